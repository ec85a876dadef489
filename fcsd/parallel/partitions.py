"""Weights that ZeRO-3 divides among all ranks: how they are divided, what they are as a whole, and how they are read.

DeepSpeed leaves an empty tensor in place of a weight that it has divided. Its hooks gather the weights of a module for
the passes of that module. Whoever reads a weight elsewhere must gather it with ``gathered``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def partition(weights: Sequence[nn.Parameter]) -> None:
    """Sends the values of rank 0 to all ranks, each of which keeps its part. All ranks call this together."""
    from deepspeed.runtime.zero import Init

    Init(module=nn.ParameterList(weights))


def is_partitioned(weight: Tensor) -> bool:
    """Whether ZeRO-3 has divided a weight."""
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight, which may be divided."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def gathered(weight: Tensor) -> AbstractContextManager[Any]:
    """A block in which a weight is whole; all ranks enter it together. An alias that is made in it stays whole."""
    if not is_partitioned(weight):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(weight)
