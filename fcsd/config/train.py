"""`train`: the optimizer's side of the run."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fcsd.config.fields import Count, NonNegative, Positive, Section, Weight, whole

Beta = Annotated[float, Field(ge=0, lt=1)]


def _no_stage_3(value: object) -> object:
    if value == 3:
        raise ValueError(
            "ZeRO-3 would part the output head, which the loss reads outside of its module, and release parameters "
            "that the reordered backward pass of overlapped experts still needs; expert_parallel shards most weights"
        )
    return value


class NonFinite(Section):
    """What becomes of a step whose loss or gradients are NaN or infinite. It never changes a weight."""

    skip: NonNegative = 0
    """Such steps in a row that are passed over; one more ends the run."""


class Train(Section):
    """The optimizer's side of the run."""

    batch_tokens: Positive = 8192
    """Tokens per optimizer step, over all processes."""
    micro_batch_size: Positive = 8
    """Rows per forward pass and process."""
    steps: Positive = 300
    """Optimizer steps."""
    tokens: Count | None = None
    """Budget in tokens that gives `steps`, rounded up to whole steps; null leaves it to `steps`."""
    lr: Annotated[float, Field(gt=0)] = 2e-5
    """AdamW's peak learning rate."""
    min_lr: Weight = 0.0
    """Learning rate at the last step."""
    horizon: Positive | None = None
    """Steps over which the schedule is laid out, for a run that ends earlier; null is `steps`."""
    warmup_steps: NonNegative = 10
    """Steps of linear rise from 0 to lr."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the fall from lr to min_lr."""
    weight_decay: Weight = 0.0
    """AdamW's decoupled weight decay."""
    betas: list[Beta] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW's decay rates of the two moments."""
    grad_clip: Weight = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations; the optimizer keeps fp32."""
    zero_stage: Annotated[Literal[0, 1, 2], BeforeValidator(_no_stage_3)] = 1
    """DeepSpeed ZeRO stage."""
    expert_parallel: Positive = 1
    """Processes that divide the experts of each MoE layer among them; 1 leaves all experts on every process."""
    overlap: Literal["on", "eager-sync", "off"] = "on"
    """Under expert_parallel: hide the all-to-alls, await each where it starts, or run the blocking parts."""
    transport: Literal["auto", "nccl"] = "auto"
    """Under expert_parallel: GPUs of one host copy rows into each other's memory, or NCCL sends them as elsewhere."""
    fused: bool = True
    """Under expert_parallel, on GPUs: one kernel for each norm and each move of rows; rounds otherwise."""
    teacher_placement: Literal["auto", "sharded", "replicated"] = "auto"
    """Whether expert_parallel holds for the teacher, too; `auto` shards it with the student."""
    activation_checkpointing: bool = False
    """Recompute activations in backward, trading time for memory."""
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    save_every: NonNegative = 100
    """Steps between checkpoints; 0 saves only the last."""
    eval_every: NonNegative = 0
    """Steps between held-out losses; 0 measures only at the end."""
    trace_every: NonNegative = 0
    """Steps between those that are profiled for exposed communication, under expert_parallel; 0 profiles none."""
    sample_tokens: NonNegative = 64
    """Longest answer of student and teacher to the fixed prompts at each evaluation; 0 asks nothing."""
    keep: Positive = 2
    """Newest checkpoints to keep."""
    nonfinite: NonFinite = NonFinite()
    """What becomes of a step whose loss or gradients are NaN or infinite."""
    save_failures: NonNegative = 3
    """Saves in a row that a full disk may prevent before the run stops."""
    stuck_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time without a step on any process before the run ends itself; saving and scoring count."""
    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Time between SIGTERM and the end of the process; a save that takes longer is not begun."""

    @model_validator(mode="before")
    @classmethod
    def _steps_of_tokens(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("tokens") is None or given.get("steps"):
            return given
        tokens, batch = whole(given["tokens"]), given.get("batch_tokens", cls.model_fields["batch_tokens"].default)
        if not isinstance(tokens, int) or not isinstance(batch, int) or min(tokens, batch) < 1:
            return given  # the fields themselves say what is wrong
        return {**given, "steps": -(-tokens // batch)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens is not None and self.steps != -(-self.tokens // self.batch_tokens):
            raise ValueError(
                f"train.tokens ({self.tokens}) is {-(-self.tokens // self.batch_tokens)} steps of "
                f"{self.batch_tokens} tokens, but train.steps is {self.steps}; give one, set the other to null"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr ({self.min_lr}) is above train.lr ({self.lr})")
        if self.teacher_placement == "sharded" and self.expert_parallel == 1:
            raise ValueError("train.teacher_placement sharded needs train.expert_parallel above 1")
        if self.trace_every and self.expert_parallel == 1:
            raise ValueError("train.trace_every needs train.expert_parallel above 1; else there is nothing to expose")
        if self.warmup_steps >= self.schedule_steps:
            raise ValueError(f"train.warmup_steps ({self.warmup_steps}) leaves none of {self.schedule_steps} steps")
        if self.steps > self.schedule_steps:
            raise ValueError(f"train.steps ({self.steps}) go beyond train.horizon ({self.horizon})")
        return self

    @property
    def schedule_steps(self) -> int:
        """Steps of the whole schedule, of which the run takes the first ``steps``."""
        return self.horizon or self.steps
