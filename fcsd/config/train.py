"""`train`: batches, length and precision of a run, and what it logs."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fcsd.config.fields import Count, Dtype, NonNegative, Positive, Section, whole
from fcsd.models.adapters import GROUPS

Word = Annotated[str, Field(min_length=1, max_length=256)]


class Adapter(Section):
    """Matrices of low rank that train beside frozen weights; docs/adapters.md explains them. An adapter adds
    `alpha / rank * B @ A` to a weight (LoRA), where A has `rank` rows and B `rank` columns."""

    rank: Positive = 64
    """The rank of each adapter. More can learn more and takes more memory."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The numerator of the factor `alpha / rank` of each adapter; null means `rank`, and so a factor of 1."""
    targets: list[Word] = Field(default=list(GROUPS), min_length=1)
    """The linear layers that have adapters: `attention`, `mlp` (dense MLPs), `shared_experts`, or names in the model's
    decoder layers such as `q_proj` or `self_attn.o_proj`. Routed experts are frozen."""
    layers: Word = "all"
    """The decoder layers that have adapters: `converted`, those that the wiring names, or as in `init.layers`. Student
    and teacher share the first layers if these are not converted and nothing trains in them or before them."""

    base: Literal["nf4"] | None = None
    """How the frozen weights are held in memory: `nf4` rounds the linear layers of a bf16 model to four bits when it is
    loaded (QLoRA), for student and teacher. Each process holds all of them. `final/` is a plain checkpoint of
    the rounded weights and the adapters. It needs `pip install 'fcsd[nf4]'` and a model without routed experts. null
    holds them in `train.dtype`."""

    @property
    def factor(self) -> float:
        """What multiplies the product of an adapter's two matrices."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Train(Section):
    """Batches, length and precision of a run, and what it logs."""

    batch_tokens: Positive = 8192
    """Tokens per optimizer step, over all processes. A multiple of `micro_batch_size` * `data.seq_len` * processes."""
    micro_batch_size: Positive = 8
    """Rows of `data.seq_len` tokens per forward pass and process. Smaller values need less memory; the result of a step
    is the same up to rounding."""
    steps: Positive = 300
    """The number of optimizer steps of the run."""
    tokens: Count | None = None
    """The length of the run in tokens, instead of `steps`; it is rounded up to whole steps. null means `steps`."""
    dtype: Dtype = "bf16"
    """The precision of weights and activations. The optimizer keeps its copy of the weights in fp32."""
    attention: Literal["packed", "masked"] = "packed"
    """How attention stays inside the documents of a packed row, on GPUs in bf16. `packed` computes the scores inside
    documents alone; `masked` computes all scores of a row and masks the rest, which is slower and rounds differently.
    Models with sliding windows or chunks, other devices and fp32 always use `masked`."""
    compile: bool = False
    """Compile each decoder layer of student and teacher by torch.compile. It helps small models, whose step is limited
    by the number of kernels that the host starts; the first step takes about a minute longer. Results differ in
    rounding. It needs `parallel.ep_size: 1`."""
    adapter: Adapter | None = None
    """Train adapters beside frozen weights instead of the weights. The teacher is then the model itself with its
    adapters off and in the standard wiring, so no second copy of the weights is in memory. null trains the weights, or
    those parts that `optim.train` names."""
    activation_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass: less memory, one more forward pass per step."""
    log_every: Positive = 10
    """The number of optimizer steps between lines of metrics.jsonl."""
    eval_every: NonNegative = 0
    """The number of optimizer steps between measurements of the held-out loss; 0 measures only at the end."""
    trace_every: NonNegative = 0
    """With `parallel.ep_size` above 1: the number of optimizer steps between steps that are profiled to measure exposed
    communication; 0 profiles none."""
    sample_tokens: NonNegative = 64
    """The longest answer, in tokens, that student and teacher generate to each of the fixed prompts at an evaluation;
    0 generates none."""

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
        return self
