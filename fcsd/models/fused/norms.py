"""Replaces transformers' RMSNorm, which starts six kernels, by torch's, which has one forward and one backward kernel.

Both compute the same function. torch rounds the result once, whereas transformers also rounds the normalised input
before the weight multiplies it.

The kernels exist on GPUs. On the meta device torch would split its norm into small operations that keep more for the
backward pass, so ``_OnMeta`` stands for the kernels there.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..arch import Arch
from . import swap_classes


class FusedNorm(nn.Module):
    """An RMSNorm that one kernel of torch computes; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_norms(fused=False)`` restores
    epsilon: str  # the name of the attribute that holds epsilon
    offset: int  # what is added to the weight
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., width]``, normalised over the width in fp32 and multiplied by ``offset + weight``, ``[width]``."""
        hidden, scale = hidden_states, self.weight
        if self.offset:
            hidden, scale = hidden.float(), self.offset + scale.float()  # bf16 would round it
        if hidden.is_meta:
            return _OnMeta.apply(hidden, scale).to(hidden_states.dtype)  # type: ignore[union-attr]
        return functional.rms_norm(hidden, scale.shape, scale, getattr(self, self.epsilon)).to(hidden_states.dtype)


class _OnMeta(torch.autograd.Function):
    """Allocates and keeps what torch's kernels do on a GPU: the input, the weight and an fp32 scale for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors[:2]
        return torch.empty_like(hidden), torch.empty_like(weight)


def fuse_norms(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let torch's kernel compute every RMSNorm of a model, or restore transformers' code; the call can be repeated."""
    concerns = partial(is_norm, arch)
    swap_classes(model, FusedNorm, concerns, fused, epsilon=arch.norm_epsilon or "", offset=arch.norm_offset)


def is_norm(arch: Arch, module: nn.Module) -> bool:
    """Whether a module is an RMSNorm that transformers' code computes.

    It has the epsilon that the row names, one argument, and one parameter: its weight ``[width]``. The norms of linear
    attention take a gate, too.
    """
    return (
        arch.norm_epsilon is not None
        and hasattr(module, arch.norm_epsilon)
        and type(module).forward.__module__.startswith("transformers.")
        and type(module).forward.__code__.co_argcount == 2
        and [(name, parameter.ndim) for name, parameter in module.named_parameters()] == [("weight", 1)]
    )
