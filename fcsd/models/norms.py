"""RMSNorm by torch's own kernel, one forward and one backward, in place of the six that transformers' code starts.

The same function, rounded once: transformers rounds the normalised input before its weight multiplies it.
"""

from functools import cache

from torch import Tensor, nn
from torch.nn import functional

from .archs import Arch


class FusedNorm(nn.Module):
    """A norm that torch computes at once; mixed in front of transformers' own class."""

    unfused: type[nn.Module]  # the class to go back to
    epsilon: str  # the name of its attribute
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., width]``, normalised over the width in fp32 and multiplied by the weight ``[width]``."""
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, getattr(self, self.epsilon))


@cache
def _fused_class(cls: type[nn.Module], epsilon: str) -> type[nn.Module]:
    # The name stays: transformers initialises norms by it.
    return type(cls.__name__, (FusedNorm, cls), {"__module__": cls.__module__, "unfused": cls, "epsilon": epsilon})


def fuse_norms(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let torch's kernel compute every RMSNorm of a model, or transformers' code again; repeatable."""
    for module in model.modules():
        if isinstance(module, FusedNorm):
            module.__class__ = module.unfused  # pyright: ignore[reportAttributeAccessIssue]
        if fused and type(module).__name__.endswith("RMSNorm"):
            module.__class__ = _fused_class(type(module), arch.norm_epsilon)  # pyright: ignore[reportAttributeAccessIssue]
