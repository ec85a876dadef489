"""Distillation: the student follows the frozen teacher over packed text, from the recipe to a finished run."""

import math
import sys
from contextlib import ExitStack
from pathlib import Path

import datasets
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, enable_full_determinism, set_seed

from fcsd.checkpoint import resolve
from fcsd.config import Recipe, ResolvedRecipe, accumulation
from fcsd.distill.data.corpus import Corpus, load_tokenizer
from fcsd.distill.data.rows import Mixture, Rows
from fcsd.distill.data.shared_corpora import load_corpora
from fcsd.distill.early_stop import Watch, require_scorer
from fcsd.distill.engine import DTYPES, build_engine, import_deepspeed
from fcsd.distill.expert_parallel import check, load, wire_sharded
from fcsd.distill.metrics import Meter
from fcsd.distill.preview import preview
from fcsd.distill.run import checkpoints, manifest, run_dir
from fcsd.distill.run.agreement import require_agreement
from fcsd.distill.run.identity import flat, run_identity
from fcsd.distill.run.nonfinite import Skips
from fcsd.distill.run.report import reporting
from fcsd.distill.run.saver import Saver
from fcsd.distill.run.signals import Preemption, preempted, preemptible
from fcsd.distill.run.trackers import require_tracker
from fcsd.distill.run.watchdog import Watchdog, watched
from fcsd.distill.run.write_model import write_model
from fcsd.distill.samples import Samples
from fcsd.distill.step import measure, train_step
from fcsd.distill.student import load_student, student_source
from fcsd.distill.teacher.cache import read_teacher_cache
from fcsd.distill.teacher.original import identify_teacher, needs_teacher, output_head, teacher_name
from fcsd.distill.teacher.targets import expect_comparable, live_teacher
from fcsd.eval.score import Scorer
from fcsd.launch.preflight import TIMEOUT
from fcsd.launch.world import World, join_world
from fcsd.plan import Hardware, plan
from fcsd.plan.report import to_text


def distill(
    resolved: ResolvedRecipe,
    *,
    resume: str = "auto",
    dry_run: bool = False,
    processes: int = 1,
    scorer: Scorer | None = None,
    join_timeout: float = TIMEOUT,
) -> Path:
    """Runs a recipe, from its start or from a checkpoint; every process of the run calls it.

    Args:
        resume: ``auto`` continues from the newest whole checkpoint in the run directory, if there is one;
            ``never`` insists on a new run; anything else is the path of a checkpoint.
        dry_run: check the recipe, say what it would do on ``processes`` GPUs, and plan it; nothing is written.
        scorer: the benchmark of ``early_stop.metric``, from ``fcsd.eval.early_score``.
        join_timeout: seconds to wait for the other processes.

    Returns: the run directory, with ``checkpoints/``, ``final/``, ``metrics.jsonl`` and ``curves.png``. With early
        stopping, ``final/`` is the best checkpoint, else the last.

    Raises:
        ConfigError, BadInputError: before anything is written.
        CheckpointError: the checkpoint is damaged or belongs to another run.
        DoesNotFitError: by its plan, on a dry run.
        PeerLostError: another process of the run did not come up.
        NonFiniteError: loss or gradients are not finite; the message names the last good checkpoint.
        PreemptedError: SIGTERM or SIGUSR1; the message names the last checkpoint.
        PeerLostError: another rank is gone; one that is stuck ends all processes with the same exit code.
        DiskError: checkpoints cannot be written any more; the message names the last one.
    """
    run = Path(resolved.recipe.output_dir)
    if dry_run:
        print(preview(resolved.recipe, processes), file=sys.stderr)
        planned = plan(resolved.recipe, Hardware(processes))
        print(to_text(planned), file=sys.stderr)
        planned.check()
        return run
    require_scorer(resolved.recipe.early_stop, scorer)
    require_tracker(resolved.recipe.report)
    world = join_world(join_timeout)
    with ExitStack() as held:
        if world.rank or not sys.stderr.isatty():
            datasets.disable_progress_bars()
            transformers.utils.logging.disable_progress_bar()
        preemption = held.enter_context(preemptible(resolved.recipe.faults.grace_seconds))
        dog = held.enter_context(watched(world, resolved.recipe.faults.stuck_seconds))
        require_agreement(world, flat(resolved.recipe.model_dump()))
        world.on_first(lambda: held.enter_context(run_dir.claim(run)))
        _distill(resolved, resume, run, world, scorer, preemption, dog)
    return run


def _distill(
    resolved: ResolvedRecipe,
    resume: str,
    run: Path,
    world: World,
    scorer: Scorer | None,
    preemption: Preemption,
    dog: Watchdog,
) -> None:
    recipe, train = resolved.recipe, resolved.recipe.train
    accumulation(recipe, world.size)
    check(recipe, world.size)
    import_deepspeed()
    (enable_full_determinism if recipe.deterministic else set_seed)(recipe.seed)
    folder = run / run_dir.CHECKPOINTS
    checkpoint = world.on_first(lambda: checkpoints.find(folder, resume, _say))
    student_dir = student_source(recipe).path
    model = load_student(recipe, dtype=DTYPES[train.dtype], device=world.device)
    hashes = world.on_first(lambda: identify_teacher(recipe) if needs_teacher(recipe) else {})
    teacher = _teacher(recipe, model, world)
    targets = live = None if teacher is None else live_teacher(teacher, recipe.objective)
    tokenizer, vocab_size = load_tokenizer(student_dir), len(output_head(model))
    corpora, rows, held_out = read_data(recipe, tokenizer, vocab_size, world)
    identity = run_identity(recipe, corpora, world)
    if cache := recipe.objective.teacher_cache:
        targets, hashes = read_teacher_cache(recipe, cache, identity, vocab_size, world)
    identity |= hashes
    engine = build_engine(model, recipe, world)
    progress = checkpoints.load(checkpoint, world, engine, identity) if checkpoint else {"step": 0}
    done, watch = progress["step"], Watch(recipe.early_stop, scorer, progress)
    skips = Skips(recipe, world, progress)
    require_agreement(world, {**identity, "vocabulary": vocab_size, "first step": done + 1})
    world.on_first(lambda: run_dir.describe(run, resolved))
    saver = Saver(
        folder,
        world,
        engine,
        identity,
        lambda directory: write_model(model, student_dir, directory, world, random=recipe.init.weights == "random"),
        keep=recipe.checkpoint.keep,
        failures=recipe.faults.save_failures,
        checkpoint=checkpoint,
    )
    preemption.defer(lambda: saver.checkpoint)
    samples = Samples(run, recipe, world, tokenizer, model, teacher, done)
    if watch.missed(done):
        before = measure(engine, live, held_out, recipe, world) if held_out else {}
        watch.look(model, tokenizer, done, before)

    with ExitStack() as shown:
        reporter = shown.enter_context(reporting(run, resolved, start=done)) if world.rank == 0 else None
        shown.callback(dog.leave)  # however the steps end, what is left to do takes each rank its own time
        meter = Meter(run, recipe, world, done)
        for step in range(done + 1, train.steps + 1):
            if watch.verdict.stop:
                break
            dog.beat()
            with meter.step(step):
                metrics = train_step(engine, targets, rows, recipe, world, step)
            skipped = skips.judge(step, metrics, saver.checkpoint)
            hurry = preemption.time_left(world) < math.inf
            scored = watch.due(step) and not hurry
            evaluated = scored or step == train.steps or (_due(step, train.eval_every) and not hurry)
            if held_out is not None and evaluated:
                metrics |= measure(engine, live, held_out, recipe, world)
            if evaluated and not hurry:
                samples.take(step)
            if scored:
                metrics |= watch.look(model, tokenizer, step, metrics)
            last = step == train.steps or watch.verdict.stop
            counts = {"step": step, "tokens": step * train.batch_tokens}
            if reporter:
                reporter.advance(step)
            if last or evaluated or skipped or meter.traces(step) or step == 1 or _due(step, train.log_every):
                metrics |= meter.read(step)
                if reporter:
                    reporter.log({**counts, **metrics})
            time_left = preemption.time_left(world)
            due = last or watch.verdict.best == step or _due(step, recipe.checkpoint.every_steps)
            if last or (saver.seconds < time_left and (due or time_left < math.inf)):
                progress = {**counts, **watch.progress(), **skips.progress()}
                saver.save(step, progress, last=last, best=watch.verdict.best)
                time_left = preemption.time_left(world)
            if time_left < math.inf and not last:
                raise preempted(f"step {step} was the last", saver.checkpoint)
        if saver.checkpoint:
            last_model, best = saver.checkpoint / manifest.MODEL, checkpoints.best(folder, watch.verdict.best)
            world.on_first(lambda: run_dir.publish(manifest.verified_model(best) if best else last_model, run))


def read_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int, world: World
) -> tuple[list[Corpus], Mixture, Rows | None]:
    """The corpora of a run, its rows, and the held-out ones."""
    data = recipe.data
    sources = [*data.sources, *([data.held_out] if data.held_out else [])]
    corpora = load_corpora(sources, tokenizer, vocab_size, data.seq_len, world)
    held_out = Rows(corpora.pop(), data.seq_len) if data.held_out else None
    return corpora, training_rows(recipe, corpora), held_out


def training_rows(recipe: Recipe, corpora: list[Corpus]) -> Mixture:
    """The rows of the whole schedule in their order, of which a shorter run takes the first."""
    whole = recipe.schedule_steps * (recipe.train.batch_tokens // recipe.data.seq_len)
    packed = [Rows(corpus, recipe.data.seq_len, [recipe.seed, n]) for n, corpus in enumerate(corpora)]
    return Mixture(packed, [source.weight for source in recipe.data.sources], whole, recipe.seed)


def _teacher(recipe: Recipe, model: PreTrainedModel, world: World) -> PreTrainedModel | None:
    """The teacher, if the loss has a use for it."""
    if not needs_teacher(recipe):
        return None
    name = teacher_name(recipe)
    ep_size = recipe.parallel.teacher_ep_size
    teacher = load(resolve(name).path, ep_size, dtype=DTYPES[recipe.train.dtype], device=world.device)
    expect_comparable(model, teacher, recipe, name)
    wire_sharded(teacher, ep_size, recipe.parallel)
    return teacher.requires_grad_(False)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
