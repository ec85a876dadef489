"""Lets single kernels compute parts of a model whose experts are not divided.

The parts are norms, rotary embeddings, gated MLPs and routed experts. Every part computes the same function as
transformers' code, up to rounding.
"""

from torch import nn

from ..arch import Arch
from .experts import fuse_experts
from .mlps import fuse_mlps
from .norms import fuse_norms
from .rotary import fuse_rotary


def fuse_parts(model: nn.Module, arch: Arch, fused: bool) -> None:
    """Let kernels compute these parts, or restore transformers' code; the call can be repeated."""
    fuse_norms(model, arch, fused)
    fuse_rotary(model, arch, fused)
    fuse_mlps(model, fused)
    fuse_experts(model, fused)
