"""What conversions lost after healing: the papers' rows and ours, each with its model, wiring, share and tokens.

No law is drawn through them: the nearest rows are shown as they were measured.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

TOLD = ("MMLU", "GSM8K", "HumanEval+")  # what a reader asks for first


class Loss(NamedTuple):
    """A healed conversion.

    Attributes:
        parameters_b, active_b: parameters of the model, and those of one token, in 10^9.
        share: of the layers that were converted.
        tokens_b: tokens of healing, in 10^9.
        source: a paper's table or a raw file.
        before, after: scores in percent, by benchmark.
    """

    model: str
    parameters_b: float
    active_b: float
    wiring: str
    share: float
    tokens_b: float
    source: str
    before: dict[str, float]
    after: dict[str, float]

    @property
    def mean(self) -> float:
        """Points lost in the mean of the benchmarks that the row has; a mean that was published alone is that one."""
        lost = [self.before[name] - self.after[name] for name in self.before]
        published = [self.before[name] - self.after[name] for name in self.before if name.startswith("mean ")]
        return published[0] if published else sum(lost) / len(lost)

    def lost(self, benchmark: str) -> float | None:
        """Points lost on one benchmark; None if it was not asked."""
        return self.before[benchmark] - self.after[benchmark] if benchmark in self.before else None


@cache
def losses() -> tuple[Loss, ...]:
    """All rows."""
    return tuple(Loss(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


def nearest(parameters: float, moe: bool) -> Sequence[Loss]:
    """The three rows nearest to a model of so many parameters: with experts or without, by size, then by tokens."""

    def distance(row: Loss) -> tuple[float, float]:
        other = (row.active_b < row.parameters_b) != moe
        return abs(math.log(row.parameters_b * 1e9 / parameters)) + 2 * other, row.tokens_b

    return sorted(losses(), key=distance)[:3]
