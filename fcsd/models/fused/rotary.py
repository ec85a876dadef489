"""Lets one kernel rotate queries and keys by the angles of their positions.

transformers' attention modules call the function ``apply_rotary_pos_emb`` of their own file. It starts ten kernels. The
forward pass here is transformers' own code, with another function under this name. Both compute the same function.
transformers rounds both products and their sum, whereas the kernel rounds once.
"""

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..arch import Arch
from ..config_keys import cache_keyword
from . import swap_classes
from .latent import FusedLatentAttention, is_latent

_NAME = "apply_rotary_pos_emb"


class FusedRotary(nn.Module):
    """An attention whose queries and keys a kernel rotates; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_rotary(fused=False)`` restores

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own class."""
        forward = self.unfused.forward
        if not torch.compiler.is_compiling():  # a compiler fuses transformers' own code
            forward = _with_kernel(forward)
            if "past_key_values" in kwargs:  # what is around transformers' own code would rename it
                kwargs[cache_keyword()] = kwargs.pop("past_key_values")
        return forward(self, *args, **kwargs)


@cache
def _with_kernel(forward: Any) -> Callable[..., Any]:
    """A function with the code of ``forward`` that rotates by the kernel."""
    own = unwrap(forward)
    return FunctionType(
        own.__code__, {**own.__globals__, _NAME: _rotate_both}, own.__name__, own.__defaults__, own.__closure__
    )


def _rotate_both(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As ``apply_rotary_pos_emb``: ``[batch, heads, seq, dim]``, by angles ``[batch or 1, seq, dim or less]``."""
    from fcsd.kernels.rotary import rotate  # Triton is imported only where its kernels run

    cos, sin = (angles[..., : angles.shape[-1] // 2] for angles in (cos, sin))  # they are given twice
    return rotate(queries, keys, cos, sin)


def fuse_rotary(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let a kernel rotate the queries and keys of every attention, or restore transformers' code.

    In latent attention, kernels also put queries and keys together. The call can be repeated. It changes nothing if the
    architecture rotates in another way.
    """
    swap_classes(model, FusedRotary, _rotates, fused and arch.rotates_halves)
    swap_classes(model, FusedLatentAttention, is_latent, fused)


def _rotates(module: nn.Module) -> bool:
    """Whether a module calls ``apply_rotary_pos_emb`` in its forward pass, with angles of the usual shape.

    Vision towers may have angles without a batch, and then name the dimension that the function adds.
    """
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and _NAME in code.co_names and ("unsqueeze_dim",) not in code.co_consts
