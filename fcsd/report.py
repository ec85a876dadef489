"""What a run shows: a line for people, a line of ``metrics.jsonl`` for programs, curves for both."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fcsd.config import ResolvedRecipe

METRICS = "metrics.jsonl"
CURVES = "curves.png"
# Metrics that are drawn, in this order, if the run has them -> the axis label
_PANELS = {"kl": "KL(teacher || student)", "sft": "cross-entropy", "held_out_kl": "held-out KL"}
_PANELS |= {"held_out_sft": "held-out cross-entropy", "score": "early-stopping score"}
_PANELS |= {"grad_norm": "gradient norm", "lr": "learning rate"}


class Reporter:
    """Writes metrics as they come. On a terminal a progress bar stays below the lines."""

    def __init__(self, path: Path, tracker: Any, progress: Progress, task: TaskID) -> None:
        self._path, self._tracker, self._progress, self._task = path, tracker, progress, task

    def say(self, text: str) -> None:
        """A line for people, on stderr."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one record, which has a ``step``."""
        with self._path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self._tracker is not None:
            self._tracker.log({k: v for k, v in metrics.items() if k != "step"}, step=metrics["step"])
        self.say("  ".join(f"{name} {_short(value)}" for name, value in metrics.items()))


@contextmanager
def reporting(run: Path, resolved: ResolvedRecipe, *, start: int) -> Iterator[Reporter]:
    """A reporter for a run that begins after step ``start``; later records of an earlier attempt are dropped."""
    recipe = resolved.recipe
    path = run / METRICS
    kept = [line for line in read_metrics(run) if line["step"] <= start] if path.exists() else []
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in kept))
    part.replace(path)
    tracker = None
    if recipe.report == "wandb":
        import wandb

        tracker = wandb.init(project="fcsd", name=recipe.name, dir=str(run), config=recipe.model_dump(), resume="allow")
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(recipe.name, total=recipe.train.steps, completed=start)
        yield Reporter(path, tracker, progress, task)
    if tracker is not None:
        tracker.finish()
    draw_curves(run)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line cut off by a crash is left out."""
    records = []
    for line in (run / METRICS).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def draw_curves(run: Path) -> Path:
    """``curves.png`` from ``metrics.jsonl``: one panel for each metric over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(run)
    names = [name for name in _PANELS if any(name in record for record in records)]
    figure = Figure(figsize=(4.2 * max(1, len(names)), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), place)
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None)
        axes.set_xlabel("step")
        axes.set_title(_PANELS[name])
        axes.grid(alpha=0.3)
        if name in ("kl", "held_out_kl") and all(value > 0 for _, value in points):
            axes.set_yscale("log")
    figure.savefig(run / CURVES, dpi=120)
    return run / CURVES


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
