"""Starts the kernels of an all-reduce on the current stream.

All ranks make the same calls in the same order. Two calls on one memory must not run at the same time on a rank.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fcsd.kernels.all_reduce import programs, programs_quantised
from fcsd.kernels.all_reduce.memory import Memory, Rooms, Shape, require_dtype
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.kernels import Launch, plan_of

_SMALLEST = 2048  # values of a tile: 16 bytes of bf16 for each of 256 threads
_LARGEST = 16384  # values of a record: 32 for each of 512 threads
_LARGE = Launch(1024, 4, 1)  # the fastest on an H200
_MOST_VALUES = 2**30  # of one launch, so that offsets fit into 32 bits


def all_reduce(x: Tensor, memory: Memory, shape: Shape) -> None:
    """Replace ``x`` by its sum over the ranks; on all ranks the same bits, added in fp32 in the order of ranks.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous.
        memory: the memory of the ranks.
        shape: how the message is divided.

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


def all_reduce_large(x: Tensor, memory: Memory, rooms: Rooms, blocks: int, tile: int = _LARGEST) -> None:
    """The same as ``all_reduce`` for large messages, which are divided into calls of ``rooms.size`` bytes.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous.
        memory: the memory of the ranks.
        rooms: their memory for large messages.
        blocks: the most blocks; the same on all ranks.
        tile: how many values a block holds at once, a power of two from 256 on.

    Raises:
        ConfigError: the dtype is another one.
    """
    require_dtype(x)
    for part in x.view(-1).split(rooms.size // x.element_size()):
        grid = (min(blocks, -(-len(part) // (memory.size * tile))),)
        constants = {"MEMORY": memory.layout, "TILE": tile, "HALF": rooms.size, "num_warps": min(16, tile // 256)}
        kernel: Any = programs.pull_kernel
        with torch.cuda.device_of(part):
            kernel[grid](part, len(part), memory.bases, memory.turns, rooms.bases, memory.rank, **constants)


def all_reduce_quantised(x: Tensor, memory: Memory, shape: Shape, format: Format) -> None:
    """Replace ``x`` by its quantised sum over the ranks; on all ranks the bits of ``simulate_all_reduce``.

    Args:
        x: bf16 or fp32 ``[..., width]``, contiguous.
        memory: the memory of the ranks.
        shape: how the message is divided.
        format: the format of the values sent.

    Raises:
        ConfigError: the groups of the format do not divide the rows of ``x``.
    """
    format.row_bytes(x.shape[-1])
    shares = 1 if shape.one_shot else memory.size
    for part in x.view(-1).split(_MOST_VALUES):
        small = len(part) <= 2 * _SMALLEST * shares * shape.blocks
        record, options = _records(format, memory.slot_bytes, small, shape.record)
        blocks = min(shape.blocks, -(-len(part) // (shares * record)))
        exact = x.dtype == torch.bfloat16
        _start(programs_quantised.sum_kernel, part, memory, shape, blocks, options | {"EXACT": exact})


def all_reduce_quantised_large(
    x: Tensor, memory: Memory, rooms: Rooms, format: Format, blocks: int = 2048, launch: Launch = _LARGE
) -> None:
    """The same for large messages, which are divided into calls whose records fit into a half of a room.

    Args:
        x: bf16 or fp32 ``[..., width]``, contiguous and not empty.
        memory: the memory of the ranks.
        rooms: their memory for large messages.
        format: the format of the values sent.
        blocks: the most blocks, at most ``LARGE_BLOCKS``; the same on all ranks.
        launch: the number of values of a record, and how they are divided among threads.

    Raises:
        ConfigError: the groups of the format do not divide the rows of ``x``.
    """
    format.row_bytes(x.shape[-1])
    plan = plan_of(format, launch.values, launch)
    values = memory.size * plan.row.width  # one record of each share
    most = rooms.size // (memory.size * plan.row.bytes)  # records of a share in a call
    records = -(-x.numel() // values)
    a_call = -(-records // -(-records // most))  # calls of equal size
    kernel: Any = programs_quantised.large_kernel
    for part in x.view(-1).split(values * a_call):
        grid = (min(blocks, -(-len(part) // values)),)
        options = {"EXACT": x.dtype == torch.bfloat16, "HALF": rooms.size, "MEMORY": rooms.layout, **plan.options}
        with torch.cuda.device_of(part):
            tensors = part, len(part), rooms.bases, rooms.flags, rooms.turns
            kernel[grid](*tensors, memory.rank, ROW=plan.row, **options)


@cache
def _records(format: Format, slot_bytes: int, small: bool, record: int | None) -> tuple[int, dict[str, Any]]:
    """The number of values of a record, and the constants of the quantised kernel.

    A small message has many small records, whose values many threads share. A large one has records that fill a place.
    """
    if record is None:
        record = _SMALLEST if small else _LARGEST
    while format.row_bytes(record) > slot_bytes:
        record //= 2
    launch = Launch(record, 1, 8) if small else Launch(record, 4, 16)
    plan = plan_of(format, record, launch)
    tiles = 1 if small else min(4, slot_bytes // plan.row.bytes)
    return record, {"ROW": plan.row, **plan.options, "TILES": tiles}


def _start(kernel: Any, x: Tensor, memory: Memory, shape: Shape, blocks: int, options: dict[str, Any]) -> None:
    """Start a kernel of ``blocks`` blocks on the device of ``x``, unless there is nothing to sum."""
    if not len(x):
        return
    with torch.cuda.device_of(x):
        arguments = x, len(x), memory.bases, memory.turns, memory.rank
        kernel[(blocks,)](*arguments, MEMORY=memory.layout, ONE_SHOT=shape.one_shot, **options)
