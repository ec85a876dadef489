"""Lets single kernels compute parts of a model whose experts are not divided.

The parts are norms, rotary embeddings, gated MLPs (dense ones and shared experts) and routed experts. Every part
computes the same function as transformers' code, up to rounding: the kernel of a gated MLP rounds the product once,
whereas transformers rounds ``silu(gate)`` before it is multiplied, too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..arch import Arch
from . import swap_classes
from .experts import fuse_experts
from .norms import fuse_norms
from .rotary import fuse_rotary

_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedMLP(nn.Module):
    """A gated MLP whose product one kernel computes; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_mlps(fused=False)`` restores
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        if torch.compiler.is_compiling():  # a compiler fuses transformers' own code
            return self.unfused.forward(self, x)
        from fcsd.kernels.gated import gated_silu  # Triton is imported only where its kernels run

        return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


def fuse_mlps(model: nn.Module, fused: bool = True) -> None:
    """Let a kernel compute the product of every gated MLP with SiLU, or restore transformers' code.

    The call can be repeated. Routed experts, whose weights are stacked, are not changed.
    """
    swap_classes(model, FusedMLP, is_gated_mlp, fused)


def is_gated_mlp(module: Any) -> bool:
    """Whether a module computes ``down(silu(gate(x)) * up(x))`` and consists of these four parts.

    One that drops outputs while it trains, or limits what it multiplies, computes more than that.
    """
    more = {"dropout", "clamp"}.intersection(type(module).forward.__code__.co_names)
    if {name for name, _ in module.named_children()} != _PARTS or more:
        return False
    return isinstance(module.act_fn, SiLUActivation | nn.SiLU)


def fuse_parts(model: nn.Module, arch: Arch, fused: bool) -> None:
    """Let kernels compute these parts, or restore transformers' code; the call can be repeated."""
    fuse_norms(model, arch, fused)
    fuse_rotary(model, arch, fused)
    fuse_mlps(model, fused)
    fuse_experts(model, fused)
