"""A distillation run, from the recipe to the finished model: the student learns from the frozen teacher.

The functions follow the order of a run. ``distill_model`` checks the recipe and claims the run directory,
``prepare_run`` loads everything, ``take_steps`` trains, ``finish_step`` evaluates, logs and saves, and
``publish_model`` writes ``final/``.
"""

import gc
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.config import ResolvedRecipe
from fcsd.distill import preview
from fcsd.distill.early_stop import ScoreHistory, held_out_text
from fcsd.distill.metrics import Meter
from fcsd.distill.parts import require_base, write_merged, write_parts
from fcsd.distill.prepare import Prepared, hide_progress_bars, prepare_run
from fcsd.distill.run import checkpoints, identity, manifest, run_dir, signals
from fcsd.distill.run.report import (
    CHECKPOINT,
    HELD_OUT_LOSS,
    METRICS,
    SAMPLES,
    SCORE,
    Reporter,
    closing,
    opening,
    read_metrics,
    reporting,
)
from fcsd.distill.run.saver import Saver
from fcsd.distill.run.signals import Preemption
from fcsd.distill.run.watchdog import Watchdog, watched
from fcsd.distill.samples import Samples
from fcsd.distill.step.feed import Feed, feeding
from fcsd.distill.step.one_step import LaunchedStep, Skips, launch_step, measure
from fcsd.distill.student import write_student
from fcsd.distill.teacher.targets import without_compiling
from fcsd.errors import ConfigError, PreemptedError
from fcsd.eval.score import Scorer
from fcsd.extras import require_extra
from fcsd.launch.preflight import TIMEOUT
from fcsd.launch.world import World, join_world
from fcsd.parallel.weights.saving import OwnPart

if TYPE_CHECKING:
    from fcsd.experimental.placement.swaps import ExpertSwaps

log = logging.getLogger(__name__)


def distill_model(
    resolved: ResolvedRecipe,
    *,
    resume: str = "auto",
    dry_run: bool = False,
    processes: int = 1,
    scorer: Scorer | None = None,
    join_timeout: float = TIMEOUT,
) -> Path:
    """Runs a recipe, from its start or from a checkpoint; every process of the run calls it.

    A process that torchrun did not start is a run of its own, on one GPU or on the CPU. It may call this function
    several times, and an earlier call does not change the result of a later one. The call installs handlers for
    SIGTERM and SIGUSR1, so it must be made from the main thread. It ends the process if no step is completed for
    ``faults.stuck_seconds``.

    Args:
        resolved: the recipe, as ``load_recipe`` returns it.
        resume: ``auto`` continues from the newest whole checkpoint in the run directory, if there is one;
            ``never`` requires a new run; any other value is the path of a checkpoint.
        dry_run: checks the recipe, prints what it would do on ``processes`` GPUs, and plans it; nothing is written.
        processes: the number of GPUs that a dry run assumes.
        scorer: the benchmark of ``early_stop.metric``, from ``fcsd.eval.early_score``.
        join_timeout: seconds to wait for the other processes.

    Returns: the run directory, with ``checkpoints/``, ``final/``, ``metrics.jsonl`` and ``curves.png``. With early
        stopping, ``final/`` holds the model of the best checkpoint, otherwise that of the last.

    Raises:
        ConfigError, BadInputError: the recipe or its inputs cannot be used; this is raised before anything is written.
            BadInputError is also raised by a step in which no token counts.
        CheckpointError: the checkpoint is damaged or belongs to another run.
        DoesNotFitError: on a dry run, if by the plan the run needs more memory than a GPU has.
        PeerLostError: another process did not start, is gone, or is stuck; all processes end with its exit code.
        NonFiniteError: loss or gradients are not finite; the message names the last good checkpoint.
        PreemptedError: the process received SIGTERM or SIGUSR1; the message names the last checkpoint.
        DiskError: checkpoints can no longer be written, and the message names the last one; or there is no room for
            one before the first step.
    """
    recipe, directory = resolved.recipe, Path(resolved.recipe.output_dir)
    if dry_run:
        if resume != "auto":  # auto would set damaged checkpoints aside
            checkpoints.find(directory / run_dir.CHECKPOINTS, resume, print)
        preview.print_dry_run(recipe, processes)
        return directory
    if recipe.early_stop.benchmark and scorer is None:
        raise ConfigError(
            f"early_stop.metric {recipe.early_stop.benchmark} needs a scorer", "see fcsd.eval.early_score"
        )
    if (tracker := recipe.report.to) != "none":
        require_extra("track", f"report.to {tracker}", tracker)
    run_dir.require_usable(directory, filter(None, (recipe.model, recipe.teacher)))
    world = join_world(join_timeout)
    hide_progress_bars(world)
    with ExitStack() as held:
        preemption = held.enter_context(signals.preemptible(recipe.faults.grace_seconds))
        watchdog = held.enter_context(watched(world, recipe.faults.stuck_seconds))
        identity.require_agreement(world, identity.flat(recipe.model_dump()))
        world.on_first(lambda: held.enter_context(run_dir.claim(directory)))
        _train(prepare_run(resolved, resume, world), scorer, preemption, watchdog)
    return directory


@dataclass(frozen=True)
class Tools:
    """The objects that feed, measure, score and save the steps of a run. Only rank 0 has a ``reporter``."""

    feed: Feed
    scores: ScoreHistory
    skips: Skips
    saver: Saver
    samples: Samples
    meter: Meter
    swaps: "ExpertSwaps | None"
    reporter: Reporter | None
    preemption: Preemption
    watchdog: Watchdog

    def pause(
        self, kind: str, doing: str, amount: float | None = None
    ) -> AbstractContextManager[Callable[[float], None]]:
        """See ``Reporter.pause``; on the other ranks nothing is shown."""
        return nullcontext(lambda amount: None) if self.reporter is None else self.reporter.pause(kind, doing, amount)


@dataclass(frozen=True)
class Duties:
    """What is to be done after a step, before the next one."""

    last: bool
    score: bool
    evaluate: bool
    log: bool
    save: bool
    end: bool  # the run was asked to end

    @property
    def any(self) -> bool:
        """Whether the metrics of the step are needed before the next step is launched."""
        return self.last or self.score or self.evaluate or self.log or self.save or self.end


def _train(run: Prepared, scorer: Scorer | None, preemption: Preemption, watchdog: Watchdog) -> None:
    """Takes the remaining steps and publishes the model."""
    recipe, first = run.recipe, run.done + 1
    saver = Saver(
        run.folder,
        run.world,
        run.training,
        run.identity,
        partial(_write_model, run),
        settings=recipe.checkpoint,
        failures=recipe.faults.save_failures,
        checkpoint=run.checkpoint,
    )
    preemption.defer(lambda: saver.checkpoint)
    samples = Samples(run.directory, recipe, run.world, run.tokenizer, run.student, run.training.source, run.done)
    scores = ScoreHistory(recipe.early_stop, scorer, run.progress)
    skips = Skips(recipe, run.world, run.progress)
    found: dict[str, float] = {}
    if (unscored := scores.missed(run.done)) or _unmeasured(run):
        if run.world.rank == 0:
            log.info("measuring what the run, when it was asked to end, left out after step %d", run.done)
        with run.training.without_rounding():
            found = _held_out(run, preemption)
            if unscored:
                scores.take(run.student, run.tokenizer, run.done, found)
    with ExitStack() as shown:
        reporter = None
        if run.world.rank == 0:
            reporter = shown.enter_context(
                reporting(
                    run.directory, run.resolved, start=run.done, held_out_tokens=_held_out_tokens(run), found=found
                )
            )
            reporter.say(opening(recipe, run.directory, run.done))
        shown.callback(watchdog.leave)  # after the last step, ranks may work for different times, so none is watched
        shown.callback(saver.close)
        steps = recipe.train.steps if not scores.verdict.stop else run.done
        feed = shown.enter_context(feeding(run.rows, recipe, run.data, first, steps))
        meter = Meter(run.directory, recipe, run.world, run.hosts, run.done, feed, run.traffic)
        tools = Tools(feed, scores, skips, saver, samples, meter, expert_swaps(run), reporter, preemption, watchdog)
        gc.collect()
        gc.freeze()  # libraries and models are excluded from garbage collection, which would slow steps down
        take_steps(run, tools, range(first, steps + 1))
        publish_model(run, tools)


def expert_swaps(run: Prepared) -> "ExpertSwaps | None":
    """What moves experts between ranks during a run, if the recipe asks for it."""
    if not run.recipe.parallel.placement.every:
        return None
    from fcsd.experimental.placement.swaps import ExpertSwaps

    return ExpertSwaps(run.directory, run.recipe, run.world, run.hosts, run.training, run.progress)


def take_steps(run: Prepared, tools: Tools, steps: range) -> None:
    """Takes the steps. While the device computes a step, the host checks the metrics of the step before.

    The metrics of a step are copied to the host after the device has computed the step. If an evaluation, a line in the
    log or a checkpoint follows the step, the host waits for the metrics at once. Otherwise it reads them after it has
    launched the next step. The delay changes no result: a step whose metrics are not finite has changed no weight, and
    a checkpoint is saved only after all steps up to it have been checked.
    """
    unjudged: LaunchedStep | None = None
    for step in steps:
        tools.watchdog.beat()
        tools.saver.poll(run.hosts)
        with tools.meter.step(step):
            with tools.swaps.step(step) if tools.swaps else nullcontext():
                launched = launch_step(run.training, tools.feed.take(), run.recipe, run.data, step)
            if unjudged is not None:
                _log_if_skipped(run, tools, unjudged)
            duties = duties_after(run, tools, step)
            metrics = launched.metrics() if duties.any else {}
            skipped = duties.any and tools.skips.judge(step, metrics, tools.saver.newest)
        unjudged = None if duties.any else launched
        if duties.any:
            finish_step(run, tools, duties, step, metrics, skipped)
        if tools.reporter:
            tools.reporter.advance(step)
        if tools.scores.verdict.stop:
            break


def duties_after(run: Prepared, tools: Tools, step: int) -> Duties:
    """What is to be done after a step. The result is the same on all ranks."""
    recipe = run.recipe
    last = step == recipe.train.steps
    end = tools.preemption.time_left(run.hosts) < math.inf
    score = tools.scores.due(step) and not end
    return Duties(
        last=last,
        score=score,
        evaluate=score or last or (_is_due(step, recipe.train.eval_every) and not end),
        log=step == 1 or _is_due(step, recipe.train.log_every) or tools.meter.traces(step),
        save=tools.saver.due(step, run.hosts),
        end=end,
    )


def finish_step(
    run: Prepared, tools: Tools, duties: Duties, step: int, metrics: dict[str, float], skipped: bool
) -> None:
    """Evaluates, logs and saves after a step.

    Raises:
        PreemptedError: the run was asked to end; a checkpoint was saved if there was time.
    """
    found, asked = dict(metrics), False
    with without_compiling(run.recipe), run.training.without_rounding():
        if duties.evaluate:
            if tokens := _held_out_tokens(run):
                doing = f"measuring the held-out loss of step {step}, {tokens:,} tokens"
                try:
                    with tools.pause(HELD_OUT_LOSS, doing, tokens) as advance:
                        found |= _held_out(run, tools.preemption, advance)
                except PreemptedError:
                    asked = True  # the next attempt measures it
            if not (duties.end or asked) and run.recipe.train.sample_tokens:
                with tools.pause(SAMPLES, f"writing samples of step {step}"):
                    tools.samples.take(step)
        if duties.score and not asked:
            with tools.pause(SCORE, f"scoring step {step} by {run.recipe.early_stop.metric}"):
                found |= tools.scores.take(run.student, run.tokenizer, step, found)
    last = (duties.last or tools.scores.verdict.stop) and not asked
    if last or duties.evaluate or duties.log or skipped:
        _log(run, tools, step, found)
    best = tools.scores.verdict.best
    time_left = _time_left(run, tools)
    wanted = duties.save or best == step or time_left < math.inf
    if last or (wanted and tools.saver.seconds < time_left):
        keepers = (tools.scores, tools.skips, tools.swaps)
        progress = _counts(run, step) | {key: value for one in keepers if one for key, value in one.progress().items()}
        progress |= held_out_text(run.held_out)
        with tools.pause(CHECKPOINT, f"saving step {step}"):
            tools.saver.save(step, progress, last=last, best=best, wait=time_left < math.inf)
        time_left = _time_left(run, tools)  # a signal that came during the save needs no further step
    # A signal that came after the decision not to save lets the run take one more step, which is then saved.
    if not last and time_left < math.inf:
        raise signals.preempted(f"step {step} was the last", tools.saver.newest())


def _time_left(run: Prepared, tools: Tools) -> float:
    """``Preemption.time_left``. If the run was asked to end, a checkpoint that is being written is finished first."""
    left = tools.preemption.time_left(run.hosts)
    if left < math.inf:
        tools.saver.finish()
        left = tools.preemption.time_left(run.hosts)
    return left


def publish_model(run: Prepared, tools: Tools) -> None:
    """Writes ``final/``: the model of the best checkpoint if the model was scored, otherwise that of the last one."""
    newest = tools.saver.checkpoint
    if newest is None:
        return
    if tools.reporter and (told := closing(run.directory)):
        tools.reporter.say(told)
    verdict = tools.scores.verdict
    best = checkpoints.best(run.folder, verdict.best)
    if tools.reporter and verdict.best is not None:
        stopped = f"stopped early: {verdict.waited} scores in a row were no improvement; " if verdict.stop else ""
        tools.reporter.say(f"{stopped}final/ is the model with the best score, that of step {verdict.best}")
    chosen, parts = best or newest, run.training.parts
    kind = manifest.MODEL if parts is None else manifest.PARTS
    whole = best is None and parts is None  # the newest model was just written, or was read when the run began
    folder = run.world.on_first(lambda: newest / kind if whole else manifest.verified_model(chosen, kind))
    # A run that takes no step leaves its final/ as it is.
    if newest == run.checkpoint and run.world.on_first(lambda: run_dir.is_published(run.directory, chosen)):
        return
    if parts is None:
        run.world.on_first(lambda: run_dir.publish(folder, run.directory, chosen))
        return
    run.world.on_first(lambda: require_base(run.source, run.identity["frozen.base"], folder))
    final = run.world.on_first(lambda: run_dir.new_final(run.directory))
    write_merged(parts, folder, run.source.path, final, run.world)
    run.world.on_first(lambda: run_dir.finish(final, run.directory, chosen))


def _write_model(run: Prepared, part: OwnPart, checkpoint: Path, world: World) -> None:
    """Writes the model into the directory of a checkpoint, or what trains beside frozen weights."""
    if run.training.parts is not None:
        write_parts(part, run.source, run.identity["frozen.base"], checkpoint / manifest.PARTS, world)
        return
    random = run.recipe.init.weights == "random"
    first = world.on_first(lambda: not checkpoints.checkpoints(run.folder))
    write_student(part, run.source.path, checkpoint / manifest.MODEL, world, random=random, first=first)


def _log_if_skipped(run: Prepared, tools: Tools, launched: LaunchedStep) -> None:
    """Checks the metrics of an earlier step, and logs them only if the step was skipped."""
    metrics = launched.metrics()
    if tools.skips.judge(launched.number, metrics, tools.saver.newest):
        _log(run, tools, launched.number, metrics)


def _log(run: Prepared, tools: Tools, step: int, metrics: dict[str, float]) -> None:
    measured = tools.meter.read(step)
    if tools.reporter:
        swaps = tools.swaps.metrics() if tools.swaps else {}
        tools.reporter.log({**_counts(run, step), **metrics, **measured, **swaps})


def _held_out(
    run: Prepared, preemption: Preemption, advance: Callable[[float], None] = lambda tokens: None
) -> dict[str, float]:
    """The losses on the held-out texts, if there are any: ``held_out_kl``, ``held_out_own_kl``, ...

    Raises:
        PreemptedError: the run was asked to end, on all ranks after the same batch.
    """

    def measured(tokens: float) -> None:
        advance(tokens)
        if preemption.time_left(run.hosts) < math.inf:
            raise signals.preempted("the held-out loss was being measured", run.checkpoint)

    found: dict[str, float] = {}
    for name, rows in run.held_out.items():
        losses = measure(run.training, rows, run.recipe, run.data, measured)
        found |= {f"{name}_{term}": value for term, value in losses.items()}
    return found


def _unmeasured(run: Prepared) -> bool:
    """Whether the last record has no held-out loss, because an earlier attempt was asked to end. Same on all ranks."""
    if not run.held_out or not (run.done == run.recipe.train.steps or _is_due(run.done, run.recipe.train.eval_every)):
        return False

    def unmeasured() -> bool:
        records = read_metrics(run.directory) if (run.directory / METRICS).exists() else []
        own = [line for line in records if line["step"] == run.done]
        return bool(own) and not any(key.startswith("held_out") for line in own for key in line)

    return run.world.on_first(unmeasured)


def _held_out_tokens(run: Prepared) -> int:
    return sum(rows.per_epoch for rows in run.held_out.values()) * run.recipe.data.seq_len


def _counts(run: Prepared, step: int) -> dict[str, int]:
    return {"step": step, "tokens": step * run.recipe.train.batch_tokens}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
