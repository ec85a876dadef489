"""The backends ``symmetric`` and ``auto``: all-reduces between the GPUs of one host, each in one kernel.

The kernel works in symmetric memory. NVLink multicast is never used. A kernel occupies as many SMs as it has blocks:
few for small messages, because the fewer it takes, the less it slows the computation beside it.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.all_reduce.memory import DTYPES
from fcsd.parallel.all_reduce.window import OnStream, try_window
from fcsd.parallel.transports.transport import Work

# Bytes of a rank's values above which NCCL sums, by the number of ranks: measured on two H200s with nothing else on the
# GPUs (benchmarks/results/all_reduce.md). The numbers for more ranks, which send each other more, are estimates.
_LARGEST = {2: 2**22, 3: 2**18, 4: 2**18}
_LARGEST_OF_MORE = 2**17
_BLOCKS = ((2**16, 16), (2**20, 32), (2**22, 64))  # up to so many bytes, so many blocks


def largest(ranks: int) -> int:
    """The most bytes of a rank's values that the kernel sums among ``ranks`` ranks."""
    return _LARGEST.get(ranks, _LARGEST_OF_MORE)


def all_reduce(x: Tensor, group: Any) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous, of at most ``largest`` bytes. Nothing else may use it until the
            work was awaited.
        group: GPUs of one host that can access each other's memory.

    Raises:
        ConfigError: the dtype is another one.
    """
    from fcsd.kernels.all_reduce import programs

    window = try_window(group)
    assert window is not None, "the backend was opened"
    blocks = next(blocks for most, blocks in _BLOCKS if x.nbytes <= most)
    return OnStream(window.stream, x, lambda: programs.all_reduce(x, window.memory, blocks))


def pays(x: Tensor, group: Any) -> bool:
    """Whether this kernel was measured to be faster than NCCL for ``x`` among so many GPUs, and they can run it.

    More than two GPUs were not measured. All ranks make the first call of a group together, and not while a CUDA graph
    is captured.
    """
    measured = x.nbytes <= largest(2) and dist.get_world_size(group) == 2
    return measured and x.dtype in DTYPES and x.is_cuda and try_window(group) is not None
