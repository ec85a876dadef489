"""A step that decodes in slots takes the most likely token, and notices slots whose logits are NaN or infinite."""

import math
from typing import Any

import pytest
import tiny
import torch

from fcsd.engine.decode import Stepper
from fcsd.engine.slots import Slots
from fcsd.errors import NonFiniteError


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_logit_ends_the_answer_of_its_slot(value: float) -> None:
    model: Any = tiny.model("llama")
    stepper = Stepper(model, Slots(3, 64, model.device), graphs=False)
    stepper.prefill(tiny.tokens(batch=3, length=5).tolist(), [0, 1, 2])
    stepper.decode(1, [0, 1, 2])
    assert stepper.finite.tolist() == [True, True, True]

    def spoil(module: Any, inputs: Any, logits: torch.Tensor) -> None:
        logits[1, 0, 7] = value

    handle = model.lm_head.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError):
        stepper.decode(1, [0, 1, 2])
    handle.remove()
    assert stepper.finite.tolist() == [True, False, True]
    stepper.decode(1, [0, 2])  # the other answers go on
    with pytest.raises(NonFiniteError):
        stepper.decode(1, [1])
