"""Prepares a run for its first step: loads the models and the text, builds the engine, and loads a checkpoint."""

import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy
import torch
import torch.distributed as dist
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fcsd.checkpoint import Checkpoint, whole_sha256
from fcsd.config import Recipe, ResolvedRecipe, accumulation
from fcsd.distill.data.corpus import load_tokenizer
from fcsd.distill.data.of_run import read_data
from fcsd.distill.data.rows import Mixture, Rows
from fcsd.distill.early_stop import scored_text
from fcsd.distill.experts import expert_parallel
from fcsd.distill.inputs import student_source, teacher_name
from fcsd.distill.optim import update
from fcsd.distill.parts import read_parts
from fcsd.distill.run import checkpoints, manifest, run_dir
from fcsd.distill.run.identity import flat, require_agreement, run_identity
from fcsd.distill.run.saver import require_room
from fcsd.distill.step.engine import (
    Training,
    build_training,
    import_deepspeed,
    load_teacher,
    share_weights,
    shares_weights,
)
from fcsd.distill.student import (
    DTYPES,
    check,
    chosen_parts,
    least_disk,
    load_student,
    student_config,
    train_parts,
)
from fcsd.distill.teacher.shared import require_own_weights
from fcsd.distill.teacher.targets import LiveTeacher, TeacherSource, identify_teacher
from fcsd.distill.train_engine import Teams, make_trainable, teams_of
from fcsd.launch.world import World
from fcsd.models.adapters.targets import Chosen
from fcsd.models.adapters.trained import TrainedParts
from fcsd.parallel.transports.transport import Traffic
from fcsd.parallel.weights.trained import load_trained


@dataclass(frozen=True)
class Prepared:
    """Everything that the steps of a run use.

    Attributes:
        world: the processes of the run; their collectives run on the device.
        data: those of them that divide the rows, of which this is one: all, without tensor parallelism.
        hosts: the same processes in a gloo group; its collectives do not make a host wait for its device.
        source: the checkpoint that the student was made from.
        training: the student, its engine, and the source of its targets.
        traffic: counts the bytes that dispatch and combine send; None if no experts are divided.
        rows: the rows of the whole schedule.
        held_out: rows that are only evaluated and never trained on, by the field of ``data`` that names their text.
        identity: the facts that a run must share with this one in order to continue from its checkpoints.
        checkpoint: the checkpoint from which the run continues; None if it starts anew.
        progress: the progress stored in ``checkpoint``; ``{"step": 0}`` without a checkpoint.
    """

    resolved: ResolvedRecipe
    world: World
    data: World
    hosts: World
    source: Checkpoint
    training: Training
    tokenizer: PreTrainedTokenizerBase
    traffic: Traffic | None
    rows: Mixture
    held_out: dict[str, Rows]
    identity: dict[str, Any]
    checkpoint: Path | None
    progress: dict[str, Any]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.resolved.recipe

    @property
    def student(self) -> PreTrainedModel:
        """The model that is trained."""
        return self.training.model

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.recipe.output_dir)

    @property
    def done(self) -> int:
        """The number of steps that were taken before this process started."""
        return self.progress["step"]

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self.directory / run_dir.CHECKPOINTS


def prepare_run(resolved: ResolvedRecipe, resume: str, world: World) -> Prepared:
    """Loads everything that a run needs, and its checkpoint if it continues; every process of the run calls this.

    Args:
        resume: see ``distill_model``.

    Raises:
        ConfigError, BadInputError: the recipe cannot run on these processes or on this data; nothing is written.
        CheckpointError: the checkpoint is damaged or belongs to another run.
        DiskError: not even one checkpoint of a new run could be saved.
    """
    recipe, say = resolved.recipe, _say if world.rank == 0 else lambda text: None
    accumulation(recipe, world.size)
    check(recipe, world.size)
    import_deepspeed()
    teams = teams_of(recipe, world)
    _seed(recipe.seed, recipe.deterministic)
    start = find_start(recipe, resume, world)
    say("reading the text ...")
    # The data come first, because a fault in them is found in less time than it takes to load a model.
    path, vocab_size = start.source.path, start.config.get_text_config().vocab_size
    tokenizer = load_tokenizer(path)
    corpora, rows, held_out = read_data(recipe, path, tokenizer, vocab_size, world)
    say(f"loading {recipe.model} ...")
    student, parts = start_student(recipe, start, world, teams)
    traffic = Traffic() if recipe.parallel.ep_size > 1 else None
    dispatcher = None  # one for both models, which may share its buffers
    if traffic is not None:
        dispatcher = expert_parallel.dispatcher_for(recipe.parallel, recipe.parallel.ep_size)
    source = TeacherSource()
    if recipe.train.draft_head:
        source = LiveTeacher(student, recipe.objective)  # of its own head
    elif recipe.needs_original and not shares_weights(recipe):
        say(f"loading the teacher {teacher_name(recipe)} ...")
        teacher = load_teacher(recipe, student, world, traffic, dispatcher, teams.ranks)
        source = LiveTeacher(teacher, recipe.objective)
    identity = run_identity(recipe, corpora, world) | start.hashes | scored_text(recipe.early_stop, held_out)
    training = build_training(student, source, recipe, world, traffic, dispatcher, teams, parts)
    if parts is not None and shares_weights(recipe):
        shared = share_weights(parts, recipe, traffic, dispatcher, teams.ranks)
        training = replace(training, source=shared)
    progress = checkpoints.load(start.checkpoint, world, training, identity) if start.checkpoint else {"step": 0}
    update.install(training.engine, recipe)  # takes what a checkpoint has put into the engine
    require_agreement(world, {**identity, "vocabulary": vocab_size, "first step": progress["step"] + 1})
    world.on_first(lambda: run_dir.describe(Path(recipe.output_dir), resolved))
    return Prepared(
        resolved=resolved,
        world=world,
        data=teams.data,
        hosts=hosts_of(world),
        source=start.source,
        training=training,
        tokenizer=tokenizer,
        traffic=traffic,
        rows=rows,
        held_out=held_out,
        identity=identity,
        checkpoint=start.checkpoint,
        progress=progress,
    )


class Start(NamedTuple):
    """Where a run begins; no weight has been loaded for it.

    Attributes:
        source: the checkpoint that the student was made from.
        chosen: what trains beside frozen weights; None if all weights train.
        checkpoint: the checkpoint from which the run continues; None if it starts anew.
        config: the student's.
        hashes: those of the teacher and of what is frozen, which belong to the identity of the run.
    """

    source: Checkpoint
    chosen: Chosen | None
    checkpoint: Path | None
    config: PretrainedConfig
    hashes: dict[str, str]


def find_start(recipe: Recipe, resume: str, world: World) -> Start:
    """Finds the student, the checkpoint and the teacher of a run, and compares their hashes.

    Raises:
        ConfigError, BadInputError, CheckpointError, DiskError: see ``prepare_run``.
    """
    directory, source = Path(recipe.output_dir), student_source(recipe)
    chosen = chosen_parts(recipe, source)  # a part that no model has is not said to be a change of the run
    checkpoint = world.on_first(lambda: checkpoints.find(directory / run_dir.CHECKPOINTS, resume, _say))
    if checkpoint:
        world.on_first(lambda: checkpoints.require_model(checkpoint, flat(recipe.model_dump())))
    config = student_config(recipe, source)
    if not checkpoint:
        world.on_first(lambda: require_room(directory, least_disk(recipe, config, chosen)))
    hashes = world.on_first(lambda: identify(recipe, source))
    return Start(source, chosen, checkpoint, config, hashes)


def identify(recipe: Recipe, source: Checkpoint) -> dict[str, str]:
    """The hashes of the teacher in memory, and ``frozen.base`` where weights are frozen.

    This is that of the whole model that the student starts with, its wiring and tokenizer included.

    Raises:
        BadInputError, ConfigError: see ``identify_teacher``; or the frozen weights are not the teacher's.
    """
    found = identify_teacher(recipe) if recipe.needs_original else {}
    if recipe.frozen_beside is None:
        return found
    if found:
        require_own_weights(recipe, found["teacher.sample"])
    return found | {"frozen.base": whole_sha256(source.layout)}


def start_student(
    recipe: Recipe, start: Start, world: World, teams: Teams
) -> tuple[PreTrainedModel, TrainedParts | None]:
    """Loads the student, or what a checkpoint has of it, and what trains beside its frozen weights."""
    trained = start.checkpoint / manifest.MODEL if start.checkpoint is not None and start.chosen is None else None
    saved = {} if start.checkpoint is None else manifest.read_manifest(start.checkpoint)["progress"]
    orders = saved.get("placement", {}).get("layers")  # of experts that have changed their places
    placed: Any = {"device": world.device, "orders": orders, "ranks": teams.ranks}
    student = load_student(recipe, dtype=DTYPES[recipe.train.dtype], config=start.config, trained=trained, **placed)
    if start.chosen is None:
        return student, None
    make_trainable(student, teams)  # before what does not train is frozen
    parts = train_parts(student, recipe, start.chosen, teams.ranks)
    if start.checkpoint is not None:
        load_trained(parts, read_parts(start.checkpoint / manifest.PARTS), str(start.checkpoint), teams.ranks)
    return student, parts


def _seed(seed: int, deterministic: bool) -> None:
    """Seed what draws random numbers, as ``transformers.set_seed`` does, whose module imports peft for a second."""
    if deterministic:
        from transformers import enable_full_determinism

        return enable_full_determinism(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def hide_progress_bars(world: World) -> None:
    """Hides the progress bars of loading and tokenising, except on rank 0 in a terminal."""
    if world.rank or not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def hosts_of(world: World) -> World:
    """The same processes in a gloo group. Its collectives do not make a host wait for its device."""
    if world.device.type == "cpu":
        return world
    group: Any = dist.new_group(backend="gloo")
    return World(world.rank, world.size, torch.device("cpu"), group)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
