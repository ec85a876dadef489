"""Sends metrics to a tracker such as wandb. If the tracker fails to start, to answer or to end, the run continues."""

import re
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from fcsd.config import Recipe
from fcsd.disk import read_input_text, write_text
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of

Log = Callable[[dict[str, Any], int], None]  # metrics and their step

_ID = "tracker_id"  # a file in the run directory; with this id a resumed run continues the same run of the tracker


class Tracker(Protocol):
    """The methods that the run objects of all trackers have in common."""

    def log(self, metrics: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


@contextmanager
def tracking(run: Path, recipe: Recipe, *, start: int) -> Iterator[Log]:
    """A function that logs to the recipe's tracker, for a run that begins after step ``start``.

    If the recipe names no tracker, the function does nothing. The first error of a tracker is printed as a warning, and
    the tracker is not used any more.
    """
    tracker: Tracker | None = None

    def attempt(action: Callable[[], Tracker | None]) -> Tracker | None:
        try:
            with redirect_stdout(sys.stderr):  # stdout is reserved for data
                return action()
        except Exception as error:
            print(f"warning: {recipe.report.to}: {reason_of(error)}; the run goes on without it", file=sys.stderr)
            return None

    def log(metrics: dict[str, Any], step: int) -> None:
        nonlocal tracker
        if (open_one := tracker) is not None:
            tracker = attempt(lambda: open_one.log(metrics, step=step) or open_one)

    if recipe.report.to != "none":
        tracker = attempt(lambda: _OPEN[recipe.report.to](run, recipe, start))
    try:
        yield log
    finally:
        if tracker is not None:
            attempt(tracker.finish)


def _wandb(run: Path, recipe: Recipe, start: int) -> Tracker:
    import wandb

    settings: Any = {"id": _id(run), "dir": str(run), "resume": "allow", "tags": recipe.report.tags}
    return wandb.init(project=recipe.report.project, name=recipe.name, config=recipe.model_dump(), **settings)  # type: ignore[return-value]


def _trackio(run: Path, recipe: Recipe, start: int) -> Tracker:
    import trackio  # type: ignore[import-not-found]

    name = f"{recipe.name}-{_id(run)}"  # trackio identifies a run by its name
    return trackio.init(project=recipe.report.project, name=name, config=recipe.model_dump(), resume="allow")


class _TensorBoard:
    """Event files in ``run/tensorboard``."""

    def __init__(self, run: Path, recipe: Recipe, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)
        self._writer.add_text("recipe", f"```json\n{recipe.model_dump_json(indent=1)}\n```")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


_OPEN: dict[str, Callable[[Path, Recipe, int], Tracker]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _TensorBoard,
}


def _id(run: Path) -> str:
    path = run / _ID
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:8])
    try:
        found = read_input_text(path, 1 << 10)
        if not re.fullmatch(r"[\w-]{1,64}", found):
            raise ValueError("it is not the id of a run")
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be used: {reason_of(error)}", "Delete it.") from error
    return found
