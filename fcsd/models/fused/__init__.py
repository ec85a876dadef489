"""Modules that compute the same as transformers' own by kernels, and how a mixin is put before their classes."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


def swap_classes(
    model: nn.Module, mixin: type[Any], concerns: Callable[[nn.Module], bool], swapped: bool, **attributes: str | int
) -> None:
    """Let a mixin compute the modules that it concerns, or restore their own classes. The call can be repeated.

    Args:
        mixin: the class that comes first. Its attribute ``unfused`` becomes the class that is restored.
        concerns: whether a module, in its own class, is to be swapped.
    """
    for module in model.modules():
        if isinstance(module, mixin):
            module.__class__ = module.unfused  # pyright: ignore[reportAttributeAccessIssue]
        if swapped and concerns(module):
            module.__class__ = with_mixin(mixin, type(module), unfused=type(module), **attributes)


@cache
def with_mixin(mixin: type[Any], cls: type[nn.Module], **attributes: type | str | int) -> type[Any]:
    """A class with a mixin before it. It keeps its name, by which transformers finds modules and initialises norms."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, **attributes})
