"""Steps whose loss or gradients are not finite: they change no weight, and a few in a row may be skipped."""

import math
import sys
from pathlib import Path
from typing import Any

from fcsd.config import Recipe
from fcsd.errors import NonFiniteError
from fcsd.launch.world import World


class Skips:
    """The steps skipped so far. All ranks decide alike, because they judge the same metrics.

    Args:
        progress: that of the checkpoint the run continues from.
    """

    def __init__(self, recipe: Recipe, world: World, progress: dict[str, Any]) -> None:
        self._allowed, self._talks = recipe.faults.nonfinite_skip, world.rank == 0
        self._rows = recipe.train.batch_tokens // recipe.data.seq_len
        self.total, self._in_a_row = progress.get("skipped", [0, 0])

    def judge(self, step: int, metrics: dict[str, float], checkpoint: Path | None) -> bool:
        """Whether the step was skipped; if so, it is counted in ``metrics``.

        Raises:
            NonFiniteError: it was one too many.
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
                hint=f"the last good checkpoint is {checkpoint or 'the start'}; lower optim.lr, use fp32, or let "
                "faults.nonfinite_skip pass over single batches",
            )
        if self._talks:
            print(f"warning: {what}; skipped, {self._in_a_row} of {self._allowed} in a row", file=sys.stderr)
        return True

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"skipped": [self.total, self._in_a_row]}
