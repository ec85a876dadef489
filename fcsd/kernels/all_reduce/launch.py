"""Starts the kernels of an all-reduce on the current stream.

All ranks make the same calls in the same order. Two calls on one memory must not run at the same time on a rank.
"""

from typing import Any

import torch
from torch import Tensor

from fcsd.kernels.all_reduce import programs
from fcsd.kernels.all_reduce.memory import Memory, Shape, require_dtype

_SMALLEST = 2048  # values of a tile: 16 bytes of bf16 for each of 256 threads
_MOST_VALUES = 2**30  # of one launch, so that offsets fit into 32 bits


def all_reduce(x: Tensor, memory: Memory, shape: Shape) -> None:
    """Replace ``x`` by its sum over the ranks; on all ranks the same bits, added in fp32 in the order of ranks.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous.

    Raises:
        ConfigError: the dtype is another one.
    """
    require_dtype(x)
    shares = 1 if shape.one_shot else memory.size
    largest = memory.slot_bytes // x.element_size()
    for part in x.view(-1).split(_MOST_VALUES):
        tile = _SMALLEST if len(part) <= 2 * _SMALLEST * shares * shape.blocks else largest
        blocks = min(shape.blocks, -(-len(part) // (shares * tile)))
        options = {"TILE": tile, "num_warps": min(16, tile // 256)}
        _start(programs.sum_kernel, part, memory, shape, blocks, options)


def _start(kernel: Any, x: Tensor, memory: Memory, shape: Shape, blocks: int, options: dict[str, Any]) -> None:
    """Start a kernel of ``blocks`` blocks on the device of ``x``, unless there is nothing to sum."""
    if not len(x):
        return
    with torch.cuda.device_of(x):
        arguments = x, len(x), memory.bases, memory.turns, memory.rank
        kernel[(blocks,)](*arguments, MEMORY=memory.layout, ONE_SHOT=shape.one_shot, **options)
