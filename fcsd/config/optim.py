"""`optim`: the optimizer and the schedule of its learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from fcsd.config.fields import DtypeOrAuto, NonNegative, Positive, Section, Weight

Beta = Annotated[float, Field(ge=0, lt=1)]


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
