"""The whole recipe, with its smaller sections."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.checkpoint import Checkpoint
from fcsd.config.data import Data
from fcsd.config.faults import Faults
from fcsd.config.fields import OutputPath, PathText, Positive, Section, Weight
from fcsd.config.objective import Objective
from fcsd.config.optim import Optim
from fcsd.config.parallel import Parallel
from fcsd.config.train import Train

MAX_ROWS = 2**31  # the order of all rows of a schedule is drawn at the start, 16 bytes a row
NO_METRIC, HELD_OUT = "none", "held_out"


class Init(Section):
    """Where the student starts."""

    weights: Literal["loaded", "random"] = "loaded"
    """`loaded` from `model`; `random` by its config's standard deviation and the seed, for training from scratch."""
    wiring: Literal["standard", "farskip", "ladder", "parallel", "desync-2x", "desync-4x"] | None = None
    """Rewires an original as `fcsd convert` would; null keeps the wiring of `model`."""
    layers: str = "all"
    """Which layers to rewire: all, last:24, first:8, 50%, 12-27 or 0,2,5-7."""
    variant: Literal["full", "attn-only", "mlp-only"] = "full"
    """As in `fcsd convert`."""
    distance: Positive = 1
    """Sub-blocks whose outputs may be in flight."""
    tp_degree: Positive = 1
    """Tensor-parallel degree, for desync."""

    @model_validator(mode="after")
    def _nothing_without_a_wiring(self) -> Self:
        if self.wiring is None and (self.layers, self.variant, self.distance, self.tp_degree) != ("all", "full", 1, 1):
            raise ValueError("init.wiring is null, so nothing is rewired, but other fields of init say how")
        return self


class EarlyStop(Section):
    """When to stop before the last step, and which checkpoint is the best."""

    metric: Annotated[str, Field(min_length=1, max_length=64)] = NO_METRIC
    """`none`; `held_out`, the cross-entropy of data.held_out; `mbpp_plus` or any other task of the suite."""
    suite: str = "strict"
    """Whose settings the task has: a suite of `fcsd eval`."""
    every: Positive = 1000
    """Steps between scores; a step whose score is the best so far is saved."""
    patience: Positive = 20
    """Scores in a row without improvement after which the run stops."""
    delta: Weight = 0.02
    """How much better a score must be to be an improvement."""
    delta_kind: Literal["relative", "absolute"] = "relative"
    """Whether delta is a share of the score to beat or a difference from it."""
    limit: Positive | None = None
    """Only the first so many documents of the task; null for all."""
    data_mirror: PathText | None = None
    """Data sets on disk, instead of the hub."""

    @property
    def benchmark(self) -> str | None:
        """The task that `fcsd eval` must score, if there is one."""
        return None if self.metric in (NO_METRIC, HELD_OUT) else self.metric


class Sweep(Section):
    """Short runs over a grid of values, stage by stage, by which the values of the full run are chosen."""

    stages: Annotated[list[dict[str, Annotated[list[Any], Field(min_length=1)]]], Field(min_length=1)]
    """By dotted key the values to try, all combinations; a stage starts from the choice of the one before it."""
    steps: Positive
    """Steps of each trial."""
    horizon: Literal["full", "trial"] = "full"
    """Whose steps the schedule is laid out for; with `full`, a trial is the beginning of the full run."""
    metric: str = "loss"
    """What is compared, a name in metrics.jsonl; the smallest wins."""
    window: Positive = 100
    """Steps at the end of a trial over which the metric is averaged."""
    then: Literal["continue", "stop"] = "continue"
    """Whether the full run follows, with the chosen values."""


class Recipe(Section):
    """One distillation run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run in logs, cards and trackers."""
    model: PathText
    """The student: a converted checkpoint, as a directory or hub id; see `init` for others."""
    init: Init = Init()
    """Where the student starts."""
    teacher: PathText | None = None
    """The frozen teacher; null is the original that the student was converted from."""
    teacher_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The teacher's fingerprint; null is what the student's conversion recorded."""
    output_dir: OutputPath
    """Run directory: checkpoints, metrics, the resolved recipe."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of data order and of every random number."""
    deterministic: bool = False
    """Bit-reproducible kernels only, at some cost in speed."""
    data: Data
    """What the student sees."""
    objective: Objective = Objective()
    """What it is asked to match."""
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
    report: Literal["none", "wandb", "trackio", "tensorboard"] = "none"
    """Where metrics go besides metrics.jsonl."""

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
        if (rows := self.schedule_steps * (self.train.batch_tokens // self.data.seq_len)) > MAX_ROWS:
            raise ValueError(
                f"train.steps ({self.train.steps}) of the schedule's {self.schedule_steps} steps take {rows:,} rows of "
                f"data.seq_len tokens; a run has at most {MAX_ROWS:,}"
            )
        if self.train.eval_every and self.data.held_out is None:
            raise ValueError("train.eval_every needs data.held_out, the text to measure on")
        if self.early_stop.metric == HELD_OUT and self.data.held_out is None:
            raise ValueError("early_stop.metric held_out needs data.held_out, the text to measure on")
        return self

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
