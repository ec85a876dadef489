"""A score of a model in training, and the function that computes it. This module imports no model code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    ScoreFunction = Callable[[PreTrainedModel, PreTrainedTokenizerBase, int, dist.ProcessGroup | None], "Score"]


@dataclass(frozen=True)
class Score:
    """A fraction or a perplexity, its standard error, and the number of items it was measured on."""

    value: float
    stderr: float
    n: int


@dataclass(frozen=True)
class Scorer:
    """A benchmark for a model in training.

    Attributes:
        score: ``score(model, tokenizer, step, group)``, called on all ranks, with the same result on each. It leaves
            the state of random number generators, the modes and the placement of the weights unchanged, and its time
            is limited.
        mode: whether the largest or the smallest score is the best.
        questions: a hash of what is asked; None if it is not known. Scores of other questions are not compared.
    """

    score: "ScoreFunction"
    mode: Literal["max", "min"] = "max"
    questions: str | None = None
