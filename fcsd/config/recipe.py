"""The whole recipe, with its smaller sections, and the arithmetic of its batches and pauses."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fcsd.config import exclusions
from fcsd.config.fields import DtypeOrAuto, InputPath, NonNegative, OutputPath, Positive, Section, Weight
from fcsd.config.sections import Data, Objective, Parallel, Train
from fcsd.errors import ConfigError

MAX_ROWS = 2**31  # the order of all rows of a schedule is drawn at the start, 16 bytes a row
NO_METRIC, HELD_OUT = "none", "held_out"
Beta = Annotated[float, Field(ge=0, lt=1)]


class Init(Section):
    """Where the student starts."""

    weights: Literal["loaded", "random"] = "loaded"
    """`loaded` takes the weights of `model`. `random` draws them with the standard deviation in the model's config and
    with `seed`, for training from scratch."""
    wiring: Literal["standard", "farskip", "ladder", "parallel", "desync-2x", "desync-4x", "desync"] | None = None
    """The wiring that an unconverted `model` gets before training, as by `fcsd convert`; null keeps that of `model`."""
    layers: str = "all"
    """The layers to rewire: all, last:24, first:8, 50%, 12-27 or 0,2,5-7."""
    variant: Literal["full", "attn-only", "mlp-only"] = "full"
    """The sub-blocks to rewire: both (`full`), or those of attention (`attn-only`) or of the MLP (`mlp-only`) only."""
    border: Literal["full", "partial"] | None = None
    """The stream that a converted layer reads after a layer that is not converted; null is the wiring's default."""
    distance: Positive = 1
    """The number of sub-blocks whose outputs may be in flight at the same time."""
    gpus: Positive = 1
    """For desync: the GPUs over which the model will be divided, its tensor-parallel degree. It is a part of the
    model."""
    reduce: str | None = None
    """The reductions that `desync` keeps: 2x, 4x, another Nx, last, or a pattern by layer such as `-,m`."""

    @model_validator(mode="after")
    def _nothing_without_a_wiring(self) -> Self:
        how = self.model_dump(exclude={"weights", "wiring"}, exclude_defaults=True)
        if self.wiring is None and how:
            raise ValueError(f"init.wiring is null, so nothing is rewired, but init.{next(iter(how))} is set")
        return self


class Optim(Section):
    """AdamW and the schedule of its learning rate."""

    lr: Annotated[float, Field(gt=0)] = 2e-5
    """The highest learning rate of AdamW; the schedule reaches it after the warm-up."""
    min_lr: Weight = 0.0
    """The learning rate at the last step of the schedule. At most `lr`."""
    horizon: Positive | None = None
    """The number of optimizer steps of the whole schedule. Set it above `train.steps` for a run that stops before the
    schedule ends, for example one that is resumed with more steps later. null means `train.steps`."""
    warmup_steps: NonNegative = 10
    """The number of optimizer steps in which the learning rate rises linearly from 0 to `lr`."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The shape of the learning rate after the warm-up: it falls from `lr` to `min_lr` along a cosine or a line, or it
    stays at `lr`."""
    weight_decay: Weight = 0.0
    """The decoupled weight decay of AdamW; 0 turns it off. It acts on the weights of linear layers, of experts and of
    embeddings, and not on the gains of norms and on biases."""
    betas: list[Beta] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """The decay rates of AdamW's first and second moment."""
    grad_clip: Weight = 1.0
    """The largest global L2 norm of the gradients; larger gradients are scaled down to it. 0 turns clipping off."""
    train: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default=[])
    """The parts whose own weights train, while all others are frozen: `converted` (the layers that the wiring names),
    `norms`, `routers`, `embeddings`, `head`, layers as in `init.layers` or by share (`last:8`, `last:25%`), or names in
    the model's decoder layers such as `o_proj`. The teacher is then the model itself, with a copy of these parts alone.
    Routed experts in them train too. With `train.adapter`, adapters train beside these parts, and routed experts stay
    frozen. Empty without `train.adapter`: all weights train."""
    accumulate_dtype: DtypeOrAuto = "auto"
    """The precision in which the gradients of micro-batches are summed. `auto` is fp32 with `parallel.zero_stage` 0, as
    in section 4.1.1 of the Ladder paper, and `train.dtype` otherwise. With bf16 weights, fp32 takes two more bytes for
    each gradient that a process holds, and `zero_stage` 1 does not offer it."""
    reduce_dtype: DtypeOrAuto = "auto"
    """The precision in which gradients are summed over the processes. `auto` is that of `accumulate_dtype`."""
    moments: Literal["fp32", "8bit"] = "fp32"
    """What AdamW's two moments are kept in. `8bit`: AdamW of bitsandbytes (`pip install 'fcsd[nf4]'`), which rounds
    every 256 neighbouring values by a scale of their own. The moments take 2 bytes instead of 8 for each parameter that
    a process updates. It needs `parallel.zero_stage` 1 or 2, and a run resumes on as many GPUs as it was started on."""
    offload: Literal["none", "host"] = "none"
    """What is kept in host memory instead of on the GPU. `host`: AdamW's two moments and the optimizer's copy of the
    weights. AdamW runs on the CPU cores; the GPU needs 12 bytes less for each parameter that a process updates, and
    each step takes longer. It needs `parallel.zero_stage` 1 or 2. AdamW is torch's own; nothing is compiled."""


class Checkpoint(Section):
    """When a run saves, and how many checkpoints it keeps."""

    every_steps: NonNegative = 100
    """The number of optimizer steps between checkpoints; 0 saves by time or only at the last step."""
    every_minutes: Annotated[float, Field(ge=0)] = 0.0
    """The time between checkpoints, in minutes, besides `every_steps`; 0 saves by steps only. A long run should save by
    time: what a kill costs is then bounded, and the disk is not kept busy by short steps."""
    keep: Positive = 2
    """The number of newest checkpoints to keep. The one with the best early-stopping score is always kept."""
    overlap: bool = False
    """Whether the run continues while a checkpoint is written. The step then waits only until each process has copied
    its state to host memory, which holds that copy for the rest of the run; `fcsd plan` says how much. If the memory
    is not free, a warning says so, and the run waits for every checkpoint. The last checkpoint and the one before a
    preemption are always waited for. On GPUs only a small model has run with it, so it is off unless a recipe asks for
    it."""


class Faults(Section):
    """What a run tolerates before it ends itself."""

    nonfinite_skip: NonNegative = 0
    """The number of successive optimizer steps with a NaN or infinite loss or gradient that are skipped; one more ends
    the run. Such a step never changes a weight."""
    save_failures: NonNegative = 3
    """The number of successive checkpoints that may fail because the disk is full; one more ends the run."""
    stuck_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """The longest time, in seconds, that a process may spend on one step before the run ends itself. Saving and scoring
    count as parts of a step."""
    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """The time, in seconds, between SIGTERM and the end of the process. No checkpoint is begun that would probably take
    longer than what is left of it."""


class EarlyStop(Section):
    """When to stop before the last step, and which checkpoint is the best."""

    metric: Annotated[str, Field(min_length=1, max_length=64)] = NO_METRIC
    """What is scored: `none`; `held_out`, the loss on data.held_out, which is the KL if the run has a teacher in memory
    and the cross-entropy otherwise; or a task of the suite: `mbpp_plus`."""
    suite: str = "strict"
    """The suite of `fcsd eval` whose settings the task has, or the YAML file of one of your own."""
    every: Positive = 1000
    """The number of optimizer steps between scores. A step whose score is the best so far is saved."""
    patience: Positive = 20
    """The number of successive scores without improvement after which the run stops."""
    delta: Weight = 0.02
    """How much better than the best score a score must be to count as an improvement; see `delta_kind`."""
    delta_kind: Literal["relative", "absolute"] = "relative"
    """Whether `delta` is a fraction of the best score (`relative`) or a difference in its unit (`absolute`)."""
    limit: Positive | None = None
    """The number of documents of the task that are scored, from the first one on; null scores all."""
    data_mirror: InputPath | None = None
    """A folder with the benchmarks' data sets, used instead of the hub; null reads them from the hub."""

    @property
    def benchmark(self) -> str | None:
        """The task that `fcsd eval` must score, if there is one."""
        return None if self.metric in (NO_METRIC, HELD_OUT) else self.metric


class Report(Section):
    """Where the metrics go, in addition to metrics.jsonl."""

    to: Literal["none", "wandb", "trackio", "tensorboard"] = "none"
    """The tracker that receives them."""
    project: Annotated[str, Field(min_length=1, max_length=128)] = "fcsd"
    """The project of the run in wandb and trackio."""
    tags: list[str] = Field(default=[])
    """Tags of the run in wandb; the others show them with the recipe."""


class Sweep(Section):
    """Short runs over a grid of values, stage by stage, by which the values of the full run are chosen."""

    stages: Annotated[list[dict[str, Annotated[list[Any], Field(min_length=1)]]], Field(min_length=1)]
    """The stages in their order. A stage maps dotted keys to the values to try, and all combinations are run. It starts
    from the values that the previous stage has chosen."""
    steps: Positive
    """The number of optimizer steps of each trial."""
    horizon: Literal["full", "trial"] = "full"
    """The learning-rate schedule of a trial: that of the `full` run, of which a trial is the beginning, or a whole
    schedule of its own (`trial`)."""
    metric: str = "loss"
    """The metric that is compared, by its name in metrics.jsonl. The trial with the smallest value is chosen."""
    window: Positive = 100
    """The number of optimizer steps at the end of a trial over which the metric is averaged."""
    then: Literal["continue", "stop"] = "continue"
    """`continue` starts the full run with the chosen values after the last stage; `stop` ends the sweep there."""


def _run_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        letters = "at most 64 letters from a to z, digits, '.', '_' and '-'"
        raise ValueError(f"should be a name of {letters} that begins with a letter or digit")
    return name


class Recipe(Section):
    """One distillation run."""

    name: Annotated[str, AfterValidator(_run_name)]
    """The name of the run in logs, model cards and trackers."""
    model: InputPath
    """The student: a converted checkpoint, as a directory or hub id. `init.wiring` allows an unconverted one."""
    init: Init = Init()
    """The weights and the wiring that the student starts with."""
    teacher: InputPath | None = None
    """The frozen teacher, as a directory or hub id; null means the original that the student was converted from."""
    teacher_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The sha256 fingerprint that the teacher must have; null means the one recorded when the student was converted."""
    output_dir: OutputPath
    """The run directory, which receives checkpoints, metrics and the resolved recipe."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of the data order and of all random numbers."""
    deterministic: bool = False
    """Use only kernels whose results are the same bits in every run. This is slower."""
    data: Data
    """The texts and chats that the student is trained on and measured on."""
    objective: Objective = Objective()
    """The loss: what the student is trained to match."""
    train: Train = Train()
    """Batches, length and precision of the run, and what it logs."""
    optim: Optim = Optim()
    """The optimizer and the schedule of its learning rate."""
    parallel: Parallel = Parallel()
    """How the run is divided among processes, and how they communicate."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run saves, and how many checkpoints it keeps."""
    faults: Faults = Faults()
    """What the run tolerates before it ends itself."""
    early_stop: EarlyStop = EarlyStop()
    """When to stop before the last step."""
    sweep: Sweep | None = None
    """For `fcsd distill --sweep`: how to choose values before the full run."""
    report: Report = Report()
    """Where the metrics go, in addition to metrics.jsonl."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        micro = self.train.micro_batch_size * self.data.seq_len
        if self.train.batch_tokens % micro:
            raise ValueError(
                f"train.batch_tokens ({self.train.batch_tokens}) is not a multiple of "
                f"train.micro_batch_size * data.seq_len ({micro})"
            )
        if self.optim.min_lr > self.optim.lr:
            raise ValueError(f"optim.min_lr ({self.optim.min_lr}) is above optim.lr ({self.optim.lr})")
        if self.optim.warmup_steps >= self.schedule_steps:
            raise ValueError(
                f"optim.warmup_steps ({self.optim.warmup_steps}) leaves none of {self.schedule_steps} steps"
            )
        if self.train.steps > self.schedule_steps:
            raise ValueError(f"train.steps ({self.train.steps}) go beyond optim.horizon ({self.optim.horizon})")
        if self.train.trace_every and self.parallel.ep_size == 1:
            raise ValueError("train.trace_every needs parallel.ep_size above 1: otherwise no communication is exposed")
        if self.train.dtype == "fp32" and "bf16" in (self.optim.accumulate_dtype, self.optim.reduce_dtype):
            raise ValueError("optim.accumulate_dtype and optim.reduce_dtype cannot be bf16 if train.dtype is fp32")
        if self.train.dtype == "bf16" and self.parallel.zero_stage == 1 and self.accumulate_dtype == "fp32":
            raise ValueError("optim.accumulate_dtype fp32 needs parallel.zero_stage 0 or 2: ZeRO-1 sums in bf16")
        if (rows := self.schedule_steps * self.rows_per_step) > MAX_ROWS:
            raise ValueError(
                f"train.steps ({self.train.steps}) of the schedule's {self.schedule_steps} steps take {rows:,} rows of "
                f"data.seq_len tokens; a run has at most {MAX_ROWS:,}"
            )
        if why := exclusions.conflict(self.settings):
            raise ValueError(why)
        if self.train.eval_every and self.data.held_out is None:
            raise ValueError("train.eval_every needs data.held_out, the text to measure on")
        if self.early_stop.metric == HELD_OUT and self.data.held_out is None:
            raise ValueError("early_stop.metric held_out needs data.held_out, the text to measure on")
        return self

    @property
    def settings(self) -> set[str]:
        """The settings of the table of ``exclusions`` that this recipe has."""
        parallel, parts, objective = self.parallel, self.optim.train, self.objective
        found = {
            exclusions.SHARDED: parallel.tp_size > 1,
            exclusions.EXPERTS: parallel.ep_size > 1 or parallel.quantised.any,
            exclusions.COMPILED: self.train.compile,
            exclusions.ON_HOST: self.optim.offload == "host",
            exclusions.UNDIVIDED: parallel.zero_stage == 0,
            exclusions.ROUNDED_MOMENTS: self.optim.moments == "8bit",
            exclusions.OTHER_STATES: self.optim.moments == "8bit" or self.optim.offload == "host",
            exclusions.MOVED: parallel.placement.every > 0,
            exclusions.FROZEN: self.frozen_beside is not None,
            exclusions.OWN_PARTS: bool(parts),
            exclusions.ADAPTERS: self.train.adapter is not None,
            exclusions.NF4: self.train.adapter is not None and self.train.adapter.base == "nf4",
            exclusions.RANDOM: self.init.weights == "random",
            exclusions.REPLICATED: parallel.teacher_placement == "replicated",
            exclusions.ALONE_ROUNDED: parallel.quantised.any and parallel.ep_size == 1,
            exclusions.DRAFTS: self.train.draft_head,
            exclusions.ROUNDED: parallel.quantised.any,
            exclusions.REWIRED: self.init.wiring is not None,
            exclusions.OTHER_TEACHER: self.teacher is not None,
            exclusions.STREAMS: objective.hidden.weight > 0,
            exclusions.BENCHMARK: self.early_stop.benchmark is not None,
            exclusions.FREEZES_TRAINED: (objective.freeze_embeddings and "embeddings" in parts)
            or (objective.freeze_lm_head and "head" in parts),
        }
        return {name for name, is_set in found.items() if is_set}

    @property
    def needs_original(self) -> bool:
        """Whether the teacher is the original, or another model in its place. That of a draft head is its own model."""
        return self.objective.needs_teacher and not self.train.draft_head

    @property
    def frozen_beside(self) -> Literal["train.adapter", "train.draft_head", "optim.train"] | None:
        """The setting that names what trains beside frozen weights; None if all weights train."""
        if self.train.adapter is not None:
            return "train.adapter"
        if self.train.draft_head:
            return "train.draft_head"
        return "optim.train" if self.optim.train else None

    @property
    def accumulate_dtype(self) -> Literal["bf16", "fp32"]:
        """The precision in which the gradients of micro-batches are summed."""
        if self.optim.accumulate_dtype == "auto":
            return "fp32" if self.parallel.zero_stage == 0 else self.train.dtype
        return self.optim.accumulate_dtype

    @property
    def reduce_dtype(self) -> Literal["bf16", "fp32"]:
        """The precision in which gradients are summed over the processes."""
        return self.accumulate_dtype if self.optim.reduce_dtype == "auto" else self.optim.reduce_dtype

    @property
    def schedule_steps(self) -> int:
        """The optimizer steps of the whole learning-rate schedule, of which the run takes the first `train.steps`."""
        return self.optim.horizon or self.train.steps

    @property
    def rows_per_step(self) -> int:
        """The rows of an optimizer step over all processes."""
        return self.train.batch_tokens // self.data.seq_len


def accumulation(recipe: Recipe, world_size: int) -> int:
    """The number of micro-batches per process and optimizer step. Processes that shard a model have the same rows.

    Raises:
        ConfigError: the batch cannot be split evenly.
    """
    degree = recipe.parallel.tp_size
    together = recipe.train.micro_batch_size * recipe.data.seq_len * (world_size // degree or 1)
    if recipe.train.batch_tokens % together:
        raise ConfigError(
            f"train.batch_tokens {recipe.train.batch_tokens} is no multiple of train.micro_batch_size * "
            f"data.seq_len * processes{' / parallel.tp_size' if degree > 1 else ''} = {together}",
            hint=f"Set it to a multiple, such as {max(together, recipe.train.batch_tokens // together * together)}, or "
            "take another number of processes.",
        )
    return recipe.train.batch_tokens // together


def pauses(after: int, last: int, *every: int) -> int:
    """How many steps from ``after + 1`` to ``last`` one of ``every`` divides (0 divides none), or are the last.

    Args:
        every: at most two numbers.
    """
    some = [each for each in every if each]
    count = sum(last // each - after // each for each in some)
    if len(some) > 1:
        count -= last // math.lcm(*some) - after // math.lcm(*some)
    return count + all(last % each for each in some)


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe, by which an editor completes keys and underlines mistakes.

    It knows keys, types, limits and meanings. Rules between several keys are checked by ``load_recipe`` alone. A recipe
    with a ``base`` may leave out what the base gives, inside sections too, so nothing inside a section is required.
    """
    schema = Recipe.model_json_schema()
    for section in schema["$defs"].values():
        section.pop("required", None)
    base = {"type": "string", "description": "The recipe, packaged or a path, that gives every value left out here."}
    schema["properties"] = {"base": base, **schema["properties"]}
    complete = {"required": schema.pop("required")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "anyOf": [complete, {"required": ["base"]}],
    }
