"""Counts steps whose loss or gradients are not finite. They change no weight, and a few in a row may be skipped."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcsd.config import Recipe
from fcsd.errors import NonFiniteError
from fcsd.launch.world import World


class Skips:
    """The steps that were skipped so far. All ranks come to the same decisions, because they see the same metrics.

    Args:
        progress: the progress stored in the checkpoint from which the run continues.
    """

    def __init__(self, recipe: Recipe, world: World, progress: dict[str, Any]) -> None:
        self._allowed, self._prints = recipe.faults.nonfinite_skip, world.rank == 0
        self._rows = recipe.rows_per_step
        self.total, self._in_a_row = progress.get("skipped", [0, 0])

    def judge(self, step: int, metrics: dict[str, float], checkpoint: Callable[[], Path | None]) -> bool:
        """Whether the step was skipped. If so, ``skipped_steps`` is added to ``metrics``.

        Args:
            checkpoint: returns the last good checkpoint, which the error names; None if there is none.

        Raises:
            NonFiniteError: more than ``faults.nonfinite_skip`` steps in a row were not finite.
        """
        if all(map(math.isfinite, metrics.values())):
            self._in_a_row = 0
            return False
        self.total += 1
        self._in_a_row += 1
        metrics["skipped_steps"] = self.total
        first = (step - 1) * self._rows
        what = f"step {step}, rows {first} to {first + self._rows - 1}: "
        what += ", ".join(f"{name} {value:g}" for name, value in metrics.items() if not math.isfinite(value))
        if self._in_a_row > self._allowed:
            raise NonFiniteError(
                what,
                hint=f"the last good checkpoint is {checkpoint() or 'the start'}; lower optim.lr, use fp32, or let "
                "faults.nonfinite_skip pass over single batches",
            )
        if self._prints:
            print(f"warning: {what}; skipped, {self._in_a_row} of {self._allowed} in a row", file=sys.stderr)
        return True

    def progress(self) -> dict[str, Any]:
        """What a checkpoint stores: the number of skipped steps in total and in a row."""
        return {"skipped": [self.total, self._in_a_row]}
