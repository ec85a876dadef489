"""The backends ``symmetric`` and ``auto``: all-reduces between the GPUs of one host, each in one kernel.

The kernel works in symmetric memory. NVLink multicast is never used. A kernel occupies as many SMs as it has blocks:
few for small messages, because the fewer it takes, the less it slows the computation beside it.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.all_reduce.memory import DTYPES, Shape
from fcsd.parallel.all_reduce.window import OnStream, try_window
from fcsd.parallel.transports.transport import Work

# Measured on two H200s with nothing else on the GPUs (benchmarks/results/README.md). Up to so many bytes of a rank's
# values, one shot is faster than two, by the number of ranks: between two ranks both send equally many bytes, and one
# shot waits once. The numbers for more ranks are estimates.
_ONE_SHOT = {2: 2**22, 3: 2**18, 4: 2**18}
_ONE_SHOT_OF_MORE = 2**17
_BLOCKS = ((2**16, 16), (2**20, 32), (2**22, 64))  # up to so many bytes, so many blocks
LARGEST = 2**22  # bytes of a rank's values above which NCCL is faster


def shape_of(x: Tensor, ranks: int) -> Shape:
    """How the reduction of ``x`` among ``ranks`` ranks is divided."""
    one_shot = x.nbytes <= _ONE_SHOT.get(ranks, _ONE_SHOT_OF_MORE)
    return Shape(one_shot, next(blocks for most, blocks in _BLOCKS if x.nbytes <= most))


def all_reduce(x: Tensor, group: Any) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous, of at most ``LARGEST`` bytes. Nothing else may use it until the
            work was awaited.
        group: GPUs of one host that can access each other's memory.

    Raises:
        ConfigError: the dtype is another one.
    """
    from fcsd.kernels.all_reduce import programs

    window = try_window(group)
    assert window is not None, "the backend was opened"
    shape = shape_of(x, window.memory.size)
    return OnStream(window.stream, x, lambda: programs.all_reduce(x, window.memory, shape))


def pays(x: Tensor, group: Any) -> bool:
    """Whether this kernel was measured to be faster than NCCL for ``x`` among so many GPUs, and they can run it.

    More than two GPUs were not measured. All ranks make the first call of a group together, and not while a CUDA graph
    is captured.
    """
    measured = x.nbytes <= LARGEST and dist.get_world_size(group) == 2
    return measured and x.dtype in DTYPES and x.is_cuda and try_window(group) is not None
