"""What a step tells the quantiser of its rows, and that no warning of transformers ends it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import tiny
import torch

from fcsd.distill.step.engine import recompute_layers
from fcsd.distill.step.feed import MicroBatch, rows_of_step
from fcsd.distill.step.one_step import _numbered


def test_tokens_are_numbered_in_the_global_batch_whatever_the_step_and_the_rank(tmp_path: Path) -> None:
    """Random rounding depends on these numbers: every step numbers from 0, and no two ranks have the same token."""
    recipe = runs.resolved(tmp_path, train__micro_batch_size=2).recipe
    told: list[tuple[int, list[int]]] = []

    def training_step(step: int, tokens: torch.Tensor) -> Any:
        told.append((step, tokens.tolist()))
        return nullcontext()

    quantiser: Any = SimpleNamespace(training_step=training_step)
    for step in (1, 3):
        told.clear()
        for rank in range(2):
            for rows in rows_of_step(recipe, SimpleNamespace(rank=rank, size=2), step):  # type: ignore[arg-type]
                with _numbered(quantiser, MicroBatch(rows, {}, torch.tensor(0), None), recipe, step):
                    pass
        assert {number for number, _ in told} == {step}
        assert all(tokens == list(range(tokens[0], tokens[0] + 2 * recipe.data.seq_len)) for _, tokens in told)
        every = sorted(token for _, tokens in told for token in tokens)
        assert every == list(range(recipe.train.batch_tokens)), step


@pytest.mark.filterwarnings("error")
def test_layers_are_recomputed_without_a_warning() -> None:
    model = tiny.model("llama")
    recompute_layers(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
