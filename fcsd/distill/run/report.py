"""Reports the course of a run: lines on the terminal, records in ``metrics.jsonl``, and ``curves.png``."""

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from fcsd.config import NO_METRIC, TERMS, Recipe, ResolvedRecipe
from fcsd.config.recipe import pauses
from fcsd.disk import append, write_picture, write_text
from fcsd.distill.run.run_dir import CHECKPOINTS
from fcsd.distill.run.trackers import Log, tracking
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of, translate
from fcsd.input_lines import read_lines
from fcsd.progress import duration, progress

HELD_OUT_LOSS, SAMPLES, SCORE, CHECKPOINT = "held-out loss", "samples", "score", "checkpoint"  # kinds of pauses
METRICS = "metrics.jsonl"
_LONGEST = 1 << 20  # bytes of a record
CURVES = "curves.png"
_NAMED_S = 1.0  # a pause is not named again if the last one of its kind was shorter, in seconds
# The metrics that are drawn if the run has them, in this order -> the title of the panel
_PANELS = {name: term.title for name, term in TERMS.items()}
_PANELS |= {
    f"held_out_{own}{name}": f"held-out {term.held_out}{where}"
    for name, term in TERMS.items()
    if term.held_out
    for own, where in [("", ""), ("own_", ", the teacher's own text")][: 1 + term.teacher]
}
_PANELS |= {"score": "early-stopping score"}
_PANELS |= {"grad_norm": "gradient norm", "lr": "learning rate"}
_PANELS |= {"tokens_per_second": "tokens/s", "mfu": "model FLOPs utilization"}


class TimeLeft:
    """Estimates when a run ends: what its steps took, and what its pauses took, the evaluations and the saves.

    A pause of a kind that has not been timed yet cannot be estimated, so it is named instead. Only the held-out loss
    can be: its tokens take at most as long as those of a step.

    Args:
        start: the number of steps that were taken before.
        held_out_tokens: the tokens over which the held-out loss is measured; 0 without held-out text.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self, recipe: Recipe, start: int, held_out_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recipe, self._start, self._held_out, self._clock = recipe, start, held_out_tokens, clock
        self._began, self._timed = clock(), dict[str, list[float]]()

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Times a block in which no step is taken."""
        began = self._clock()
        try:
            yield
        finally:
            self._timed.setdefault(kind, []).append(self._clock() - began)

    def last(self, kind: str) -> float:
        """The seconds of the last pause of a kind; infinity before the first."""
        return self._timed.get(kind, [math.inf])[-1]

    def after(self, step: int) -> tuple[float, list[str]]:
        """The seconds until the end, and the kinds of pauses in them that were not timed yet and are not counted.

        The checkpoint of ``step`` itself is still to be saved; its evaluation is over.
        """
        paused = sum(map(sum, self._timed.values()))
        each = (self._clock() - self._began - paused) / max(1, step - self._start)
        seconds, untimed = each * (self._recipe.train.steps - step), []
        for kind, count in self._pauses(step).items():
            if taken := self._timed.get(kind):
                seconds += count * sum(taken) / len(taken)
            elif count and kind == HELD_OUT_LOSS:
                seconds += count * each * self._held_out / self._recipe.train.batch_tokens
            elif count:
                untimed.append(kind)
        return seconds, untimed

    def _pauses(self, step: int) -> dict[str, int]:
        """How often the run pauses after ``step``, by kind."""
        train, early = self._recipe.train, self._recipe.early_stop
        scored = early.every if early.metric != NO_METRIC else 0
        evaluations = pauses(step, train.steps, train.eval_every, scored)
        saves = pauses(step - 1, train.steps, self._recipe.checkpoint.every_steps)
        return {
            HELD_OUT_LOSS: evaluations * (self._held_out > 0),
            SAMPLES: evaluations * (train.sample_tokens > 0),
            SCORE: (train.steps // scored - step // scored) * bool(early.benchmark) if scored else 0,
            CHECKPOINT: saves,
        }


class Reporter:
    """Writes metrics as soon as they are measured. On a terminal, a progress bar stays below the lines.

    Args:
        path: the file ``metrics.jsonl``.
        total: the number of steps at the end of the run.
    """

    def __init__(
        self, path: Path, track: Log, progress: Progress, task: TaskID, time_left: TimeLeft, total: int
    ) -> None:
        self._path, self._track, self._progress, self._task = path, track, progress, task
        self._time_left, self._total, self._name = time_left, total, progress.tasks[task].description

    def say(self, text: str) -> None:
        """Prints a line on stderr."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    @contextmanager
    def pause(self, kind: str, doing: str, amount: float | None = None) -> Iterator[Callable[[float], None]]:
        """A block in which no step is taken. It is named as it begins, unless the last one of its kind took no second.

        Args:
            kind: one of ``HELD_OUT_LOSS``, ....
            amount: the amount of its work, if it tells how far it is.

        Yields: a function that the block calls with the amount of work that was done since the call before.
        """
        if self._time_left.last(kind) >= _NAMED_S:
            self.say(f"{doing} ...")
        self._progress.update(self._task, description=doing)
        # On a terminal the bar of the run stays alone.
        quiet = amount is None or not self._progress.disable
        try:
            with self._time_left.pause(kind), progress(doing, amount or 1, quiet=quiet) as advance:
                yield advance
        finally:
            self._progress.update(self._task, description=self._name)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one record to ``metrics.jsonl``, with null for values that are not finite, and prints it.

        Args:
            metrics: the values by name, including ``step``.
        """
        record = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in metrics.items()}
        add(self._path, json.dumps(record) + "\n")
        self._track({k: v for k, v in metrics.items() if k != "step"}, metrics["step"])
        shown = "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        self.say(f"{shown}  {self._left(metrics['step'])}")

    def _left(self, step: int) -> str:
        """The share of the steps that are done, and the expected end of the run with its evaluations and saves."""
        share = f"{step / self._total:.0%} of {self._total:,} steps"
        if step == self._total:
            return share
        seconds, untimed = self._time_left.after(step)
        if untimed:
            return f"{share}, ends in {duration(seconds)} and what was not timed yet: {', '.join(untimed)}"
        end = datetime.now().astimezone() + timedelta(seconds=seconds)
        return f"{share}, ends in {duration(seconds)}, at {end:%Y-%m-%d %H:%M}"


def add(path: Path, text: str) -> None:
    """Adds lines about the run to a file. A file that cannot be written does not end the run, as with a checkpoint."""
    try:
        append(path, text)
    except OSError as error:
        reason = translate(error) or f"{path}: {reason_of(error)}"
        print(f"warning: {reason}; nothing is added to this file now; training goes on", file=sys.stderr)


@contextmanager
def reporting(
    run: Path,
    resolved: ResolvedRecipe,
    *,
    start: int,
    held_out_tokens: int = 0,
    found: Mapping[str, float] | None = None,
) -> Iterator[Reporter]:
    """A reporter for a run that begins after step ``start`` and measures its loss on ``held_out_tokens``.

    Records of later steps, which an earlier attempt wrote, are dropped. ``found``, if it is given, was measured after
    step ``start`` in this attempt, and is added to the record of that step. The curves are drawn at the end, whether
    the run succeeds or fails.
    """
    recipe = resolved.recipe
    path = run / METRICS
    kept = [line for line in read_metrics(run) if line["step"] <= start] if path.exists() else []
    kept = [{**line, **(found or {})} if line["step"] == start else line for line in kept]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    try:
        with tracking(run, recipe, start=start) as track, bar as progress:
            task = progress.add_task(recipe.name, total=recipe.train.steps, completed=start)
            time_left = TimeLeft(recipe, start, held_out_tokens)
            yield Reporter(path, track, progress, task, time_left, recipe.train.steps)
    finally:
        with suppress(OSError, BadInputError):  # if the disk is full, the error of the run itself says more
            draw_curves(run)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, and None in place of a value that was not finite.

    A last line that a crash has cut off is left out.

    Raises:
        BadInputError: the file is missing or damaged.
    """
    path = run / METRICS
    records: list[dict[str, Any]] = []
    try:
        lines = [line for line in read_lines(path, _LONGEST) if line.strip()]
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line.decode())
            except ValueError:
                if number == len(lines):
                    break
                raise
            if not _is_record(record):
                raise ValueError(f"record {number} is not one of a step")
            records.append(record)
    except (OSError, ValueError, RecursionError) as error:
        hint = "Move it away: the run goes on without the records of its earlier steps."
        raise BadInputError(f"{path}: cannot be read: {reason_of(error)}", hint) from error
    return records


def _is_record(record: Any) -> bool:
    """Whether a value is what ``Reporter`` writes for a step."""
    return (
        isinstance(record, dict)
        and type(step := record.get("step")) is int
        and step >= 0
        and all(value is None or (type(value) in (int, float) and math.isfinite(value)) for value in record.values())
    )


def draw_curves(run: Path) -> Path:
    """Draws ``curves.png`` from ``metrics.jsonl``, with a panel for each metric over the steps. Returns its path."""
    from matplotlib.figure import Figure

    records = read_metrics(run)
    names = [name for name in _PANELS if any(name in record for record in records)]
    figure = Figure(figsize=(4.2 * max(1, len(names)), 3.2), layout="constrained")
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), place)
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None)
        axes.set_xlabel("step")
        axes.set_title(_PANELS[name])
        axes.grid(alpha=0.3)
        if name in ("kl", "held_out_kl", "held_out_own_kl") and all(value > 0 for _, value in points):
            axes.set_yscale("log")
    write_picture(run / CURVES, figure)
    return run / CURVES


def closing(run: Path) -> str:
    """What the run's text has done, in words: the last divergence on every held-out text, and the lowest if it rose.

    The cross-entropy takes the place of the divergence where the run has no teacher in memory. Empty if nothing was
    measured.
    """
    records = read_metrics(run)
    term, word = ("kl", "KL") if any("held_out_kl" in record for record in records) else ("sft", "cross-entropy")
    texts = {"held_out": "data.held_out", "held_out_own": "text that the teacher wrote"}
    parts, risen = [], []
    for key, text in texts.items():
        found = [(record[f"{key}_{term}"], record["step"]) for record in records if record.get(f"{key}_{term}")]
        if not found:
            continue
        (last, step), (lowest, early) = found[-1], min(found)
        parts.append(f"{last:.4g} on {text}" + (f" (lowest at step {early:,}: {lowest:.4g})" if early < step else ""))
        risen += [key] * (early < step)
    told = f"held-out {word}, after the last step: {', '.join(parts)}" if parts else ""
    if risen == ["held_out_own"]:
        told += "\nwarning: only the one on the teacher's own text rose: the training text leads away from the teacher"
    return told


def opening(recipe: Recipe, run: Path, start: int) -> str:
    """The text before the first step: which steps it takes, where it saves, how to resume it, and any offloading."""
    settings = recipe.checkpoint
    if start >= recipe.train.steps:
        return f"No step is left to take. The checkpoints are in {run / CHECKPOINTS}."
    times = [f"every {settings.every_steps:,} steps"] * bool(settings.every_steps)
    times += [f"every {settings.every_minutes:g} minutes"] * bool(settings.every_minutes)
    return (
        f"The run takes steps {start + 1:,} to {recipe.train.steps:,}. It saves {' and '.join([*times, 'at the end'])} "
        f"to {run / CHECKPOINTS}.\nIf it is interrupted, resume it with: {_command()}{_optimizer(recipe)}"
    )


def _optimizer(recipe: Recipe) -> str:
    """A line that says where AdamW and its moments are, if that is not the default."""
    if recipe.optim.offload == "none":
        return ""
    from fcsd.distill.optim.update import optimizer_threads  # here, because `fcsd export` needs no DeepSpeed

    threads = optimizer_threads()
    where = f"on the host, with {threads} CPU thread{'s' * (threads > 1)} in each process"
    return f"\nThe optimizer is torch's fused AdamW with fp32 moments {where}. Nothing is compiled."


def _command() -> str:
    """The command that the user typed, if this process can tell; a launcher starts fcsd as a module."""
    name = Path(sys.argv[0]).name
    own = name in ("fcsd", "__main__.py")
    return shlex.join(["fcsd", *sys.argv[1:]]) if own else "the same command"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
