"""The backend ``auto``: the one that was measured to be the fastest for a message of this size among as many GPUs."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.all_reduce.memory import DTYPES
from fcsd.parallel.all_reduce.window import try_window

Fastest = Literal["nccl", "symmetric"]
# By the number of ranks: up to so many bytes of a rank's values, this one. Ranks that nobody measured reduce by NCCL.
MEASURED: Mapping[int, tuple[tuple[float, Fastest], ...]] = {2: ((2**22, "symmetric"), (math.inf, "nccl"))}


def fastest(x: Tensor, group: Any) -> Fastest:
    """The fastest backend for ``x`` among the ranks of ``group``; the same on all ranks.

    All ranks make the first call of a group together, and not while a CUDA graph is captured.
    """
    table = MEASURED.get(dist.get_world_size(group), ())
    for most, backend in table:
        if x.nbytes <= most:
            possible = x.dtype in DTYPES and x.is_cuda and try_window(group) is not None
            return backend if possible else "nccl"
    return "nccl"
