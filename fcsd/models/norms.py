"""Replaces transformers' RMSNorm, which starts six kernels, by torch's, which has one forward and one backward kernel.

Both compute the same function. torch rounds the result once, whereas transformers also rounds the normalised input
before the weight multiplies it.
"""

from functools import cache

from torch import Tensor, nn
from torch.nn import functional

from .archs import Arch


class FusedNorm(nn.Module):
    """An RMSNorm that one kernel of torch computes; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_norms(fused=False)`` restores
    epsilon: str  # the name of the attribute that holds epsilon
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., width]``, normalised over the width in fp32 and multiplied by the weight ``[width]``."""
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, getattr(self, self.epsilon))


@cache
def _fused_class(cls: type[nn.Module], epsilon: str) -> type[nn.Module]:
    # The class keeps its name, because transformers initialises norms by the name.
    return type(cls.__name__, (FusedNorm, cls), {"__module__": cls.__module__, "unfused": cls, "epsilon": epsilon})


def fuse_norms(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let torch's kernel compute every RMSNorm of a model, or restore transformers' code; the call can be repeated.

    Args:
        model: changed in place.
        arch: the architecture's row.
        fused: whether torch's kernel is used.
    """
    for module in model.modules():
        if isinstance(module, FusedNorm):
            module.__class__ = module.unfused  # pyright: ignore[reportAttributeAccessIssue]
        if fused and type(module).__name__.endswith("RMSNorm"):
            module.__class__ = _fused_class(type(module), arch.norm_epsilon)  # pyright: ignore[reportAttributeAccessIssue]
