"""A step that decodes in slots takes the most likely token, and notices slots whose logits are NaN or infinite."""

import math
from typing import Any

import pytest
import tiny
import torch

from fcsd.engine.decode import Stepper, most_likely
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


@pytest.mark.parametrize("vocab", [128 * 5, 24, 131])  # 128 parts, 8, and 1
def test_parts_of_logits_give_the_first_of_the_highest(vocab: int) -> None:
    logits = torch.randint(7, (200, vocab), generator=torch.Generator().manual_seed(0)).bfloat16()  # many are equal
    logits[1], logits[2, -1], logits[3, 0], logits[4, 2] = 0, math.nan, math.inf, -math.inf
    ids, finite = most_likely(logits)
    assert ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert finite.tolist() == logits.isfinite().all(-1).tolist()
