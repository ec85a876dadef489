"""Replaces transformers' RMSNorm, which starts six kernels, by torch's, which has one forward and one backward kernel.

Both compute the same function. torch rounds the result once, whereas transformers also rounds the normalised input
before the weight multiplies it.
"""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from ..archs import Arch
from ..class_swap import swap_classes


class FusedNorm(nn.Module):
    """An RMSNorm that one kernel of torch computes; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_norms(fused=False)`` restores
    epsilon: str  # the name of the attribute that holds epsilon
    offset: int  # what is added to the weight
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., width]``, normalised over the width in fp32 and multiplied by ``offset + weight``, ``[width]``."""
        epsilon = getattr(self, self.epsilon)
        if not self.offset:
            return functional.rms_norm(hidden_states, self.weight.shape, self.weight, epsilon)
        scale = self.offset + self.weight.float()  # bf16 would round it
        return functional.rms_norm(hidden_states.float(), scale.shape, scale, epsilon).to(hidden_states.dtype)


def fuse_norms(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let torch's kernel compute every RMSNorm of a model, or restore transformers' code; the call can be repeated.

    Args:
        model: changed in place.
        arch: the architecture's row.
        fused: whether torch's kernel is used.
    """
    concerns = partial(is_norm, arch)
    swap_classes(model, FusedNorm, concerns, fused, epsilon=arch.norm_epsilon, offset=arch.norm_offset)


def is_norm(arch: Arch, module: nn.Module) -> bool:
    """Whether a module is an RMSNorm that transformers' code computes.

    It has the epsilon that the row names, and one parameter: its weight ``[width]``.
    """
    return (
        hasattr(module, arch.norm_epsilon)
        and type(module).forward.__module__.startswith("transformers.")
        and [(name, parameter.ndim) for name, parameter in module.named_parameters()] == [("weight", 1)]
    )
