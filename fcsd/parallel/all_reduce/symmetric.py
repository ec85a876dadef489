"""The backend ``symmetric``: all-reduces between the GPUs of one host, each in one kernel over symmetric memory.

NVLink multicast is never used. A kernel occupies as many SMs as it has blocks: few for small messages, because the
fewer it takes, the less it slows the computation beside it.
"""

from typing import Any

from torch import Tensor

from fcsd.kernels.all_reduce.memory import BLOCKS, Shape
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce.window import OnStream, Window, window_of
from fcsd.parallel.transports.transport import Work

# Measured on two H200s with nothing else on the GPUs (benchmarks/results/README.md). Up to so many bytes of a rank's
# values, one shot is faster than two, by the number of ranks: between two ranks both send equally many bytes, and one
# shot waits once. The numbers for more ranks are estimates.
_ONE_SHOT = {2: 2**22, 3: 2**18, 4: 2**18}
_ONE_SHOT_OF_MORE = 2**17
_BLOCKS = ((2**16, 16), (2**20, 32), (2**62, 64))  # up to so many bytes, so many blocks
LARGE = 2**22  # bytes above which a message goes through rooms
_BLOCKS_OF_ROOMS = BLOCKS


def shape_of(x: Tensor, ranks: int) -> Shape:
    """How the reduction of ``x`` among ``ranks`` ranks is divided."""
    one_shot = x.nbytes <= _ONE_SHOT.get(ranks, _ONE_SHOT_OF_MORE)
    return Shape(one_shot, next(blocks for most, blocks in _BLOCKS if x.nbytes <= most))


def all_reduce(x: Tensor, group: Any) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous. Nothing else may use it until the work was awaited.
        group: GPUs of one host.

    Raises:
        ConfigError: the GPUs cannot access each other's memory, or the dtype is another one.
    """
    from fcsd.kernels.all_reduce import launch

    window = window_of(group)
    rooms = window.rooms(group) if x.nbytes > LARGE else None
    if rooms is not None:
        return OnStream(window.stream, x, lambda: launch.all_reduce_large(x, window.memory, rooms, _BLOCKS_OF_ROOMS))
    shape = shape_of(x, window.memory.size)
    return OnStream(window.stream, x, lambda: launch.all_reduce(x, window.memory, shape))


def all_reduce_quantised(x: Tensor, format: Format, window: Window, group: Any) -> Work:
    """The same with values that are quantised on their way; ``x`` is bf16 or fp32 ``[..., width]``.

    Raises:
        ConfigError: the groups of the format do not divide the rows.
    """
    from fcsd.kernels.all_reduce import launch

    rooms = window.rooms(group) if x.nbytes > LARGE else None
    if rooms is not None:
        large = launch.all_reduce_quantised_large
        return OnStream(window.stream, x, lambda: large(x, window.memory, rooms, format))
    # Encoding and decoding keep the SMs busy, so more blocks are faster from 256 KiB on.
    shape = shape_of(x, window.memory.size)._replace(blocks=BLOCKS)
    return OnStream(window.stream, x, lambda: launch.all_reduce_quantised(x, window.memory, shape, format))
