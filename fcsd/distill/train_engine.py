"""What fcsd uses of DeepSpeed's engine."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.models.adapters.trained import TrainedParts


class PassEngine(Protocol):
    """Runs the passes of a module, and its optimizer's steps."""

    @property
    def module(self) -> nn.Module:
        """The module, whose parameters are trained."""
        ...

    def __call__(self, *arguments: Any) -> Any:
        """Runs the module's forward pass."""
        ...

    def backward(self, loss: Tensor, **options: Any) -> Any:
        """Runs the backward pass of a loss that the forward pass returned."""
        ...

    def step(self) -> Any:
        """Takes the optimizer's step after the last micro-batch of a step, and counts any other micro-batch."""
        ...


class TrainEngine(PassEngine, Protocol):
    """DeepSpeed's engine.

    Attributes:
        optimizer: DeepSpeed's optimizer, or torch's where DeepSpeed does not wrap it.
        micro_steps: how many micro-batches were counted.
        global_steps, global_samples, skipped_steps: what checkpoints store of its counters.
        enable_backward_allreduce: whether the backward pass averages the gradients over the ranks.
    """

    optimizer: Any
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    enable_backward_allreduce: bool

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        ...

    def train(self) -> Any:
        """Puts the module into training mode."""
        ...

    def eval(self) -> Any:
        """Puts the module into evaluation mode."""
        ...

    def zero_grad(self) -> None:
        """Drops the gradients."""
        ...

    def get_global_grad_norm(self) -> Any:
        """The norm of all gradients of the last step, if DeepSpeed knows it."""
        ...

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one of its step."""
        ...

    def zero_optimization(self) -> bool:
        """Whether ZeRO divides the optimizer's states."""
        ...

    def zero_optimization_partition_weights(self) -> bool:
        """Whether ZeRO divides the weights, too."""
        ...

    def bfloat16_enabled(self) -> bool:
        """Whether the weights are in bf16, and fp32 ones are kept beside them."""
        ...

    def destroy(self) -> None:
        """Removes the engine's hooks."""
        ...


@dataclass(frozen=True)
class Trained:
    """A model in training.

    Attributes:
        engine: runs its passes and its optimizer's steps.
        model: the model inside of the engine.
        parts: what trains beside frozen weights; None if all weights train.
    """

    engine: TrainEngine
    model: PreTrainedModel
    parts: TrainedParts | None = field(default=None, kw_only=True)
