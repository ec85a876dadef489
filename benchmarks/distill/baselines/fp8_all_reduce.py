"""A baseline: the all-reduce in two shots with fp8 on the wire, as public serving engines have it.

Values travel as e4m3 with one fp32 scale for each 256 values, in both shots. A rank adds its own values to its share
without quantising them. It decodes its sums as the others do, so all ranks end with the same bits; one public kernel
keeps its own sums as they are, so that ranks differ. The turns and flags are those of ``kernels.all_reduce``.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuples ROW and MEMORY, which pyright does not know of.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels.all_reduce.memory import Memory
from fcsd.kernels.all_reduce.programs import await_signals, data_of, place_of, signal

_GROUP = 256
_SMALL, _LARGE = 4096, 16384  # values of a record


@triton.jit
def _store(record, x, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Quantise fp32 values ``[TILE / GROUP, GROUP]``, store them at an address, and return them decoded."""
    group, place = tl.arange(0, TILE // GROUP), tl.arange(0, GROUP)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    codes = (x * (448.0 / largest)[:, None]).to(tl.float8e4nv)
    scale = largest / 448.0
    values = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 16)
    tl.store(values + group[:, None] * GROUP + place[None, :], codes.to(tl.uint8, bitcast=True))
    tl.store((record + TILE).to(tl.pointer_type(tl.float32)) + group, scale)
    return codes.to(tl.float32) * scale[:, None]


@triton.jit
def _load(record, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The values of a record, fp32 ``[TILE / GROUP, GROUP]``."""
    group, place = tl.arange(0, TILE // GROUP), tl.arange(0, GROUP)
    values = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 16)
    codes = tl.load(values + group[:, None] * GROUP + place[None, :]).to(tl.float8e4nv, bitcast=True)
    scale = tl.load((record + TILE).to(tl.pointer_type(tl.float32)) + group)
    return codes.to(tl.float32) * scale[:, None]


@triton.jit
def _collect(
    x,
    n,
    bases,
    me,
    block,
    first,
    turn,
    MEMORY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,
    TILES: tl.constexpr,
):
    within = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    await_signals(bases, me, 1, block, first + turn, MEMORY)
    own = tl.load(bases + me)
    for number in range(TILES, MEMORY.ranks * TILES):
        owner = (me + number // TILES) % MEMORY.ranks
        tile = ((turn * tl.num_programs(0) + block) * MEMORY.ranks + owner) * TILES + number % TILES
        place = place_of(1, block, first + turn, owner, MEMORY)
        sums = _load(data_of(own, place, MEMORY) + number % TILES * BYTES, TILE, GROUP)
        at = tile * TILE + within
        tl.store(x + at, sums.to(x.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["me"])
def fp8_kernel(
    x,
    n,
    bases,
    turns,
    me,
    MEMORY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    BYTES: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.program_id(0)
    within = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    first, own = tl.load(turns + block), tl.load(bases + me)
    count = tl.cdiv(n, tl.num_programs(0) * MEMORY.ranks * TILES * TILE)
    for ahead in range(count + 1):
        if ahead < count:
            arrivals = place_of(0, block, first + ahead, me, MEMORY)
            for number in range(TILES, MEMORY.ranks * TILES):
                owner = (me + number // TILES) % MEMORY.ranks
                tile = ((ahead * tl.num_programs(0) + block) * MEMORY.ranks + owner) * TILES + number % TILES
                at = tile * TILE + within
                values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
                there = data_of(tl.load(bases + owner), arrivals, MEMORY)
                _store(there + number % TILES * BYTES, values, TILE, GROUP)
            signal(bases, me, 0, block, first + ahead, MEMORY)
        turn = ahead - 1
        if turn >= 0:
            await_signals(bases, me, 0, block, first + turn, MEMORY)
            sent = place_of(1, block, first + turn, me, MEMORY)
            for number in range(TILES):
                tile = ((turn * tl.num_programs(0) + block) * MEMORY.ranks + me) * TILES + number
                at = tile * TILE + within
                total = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
                for step in range(1, MEMORY.ranks):
                    place = place_of(0, block, first + turn, (me + step) % MEMORY.ranks, MEMORY)
                    total += _load(data_of(own, place, MEMORY) + number * BYTES, TILE, GROUP)
                sums = total
                for step in range(1, MEMORY.ranks):
                    base = tl.load(bases + (me + step) % MEMORY.ranks)
                    sums = _store(data_of(base, sent, MEMORY) + number * BYTES, total, TILE, GROUP)
                tl.store(x + at, sums.to(x.dtype.element_ty), mask=at < n)
            signal(bases, me, 1, block, first + turn, MEMORY)
        if turn > 0:
            _collect(x, n, bases, me, block, first, turn - 1, MEMORY, TILE, GROUP, BYTES, TILES)
    _collect(x, n, bases, me, block, first, count - 1, MEMORY, TILE, GROUP, BYTES, TILES)
    tl.store(turns + block, first + count)


def all_reduce(x: Tensor, memory: Memory, blocks: int) -> None:
    """Replace ``x``, bf16 or fp32 and contiguous, by its sum over the ranks, on the current stream.

    Args:
        x: fewer than 2^31 values.
        memory: the memory of the ranks.
        blocks: the most blocks of the kernel.
    """
    tile = _SMALL if x.numel() <= 2 * memory.size * blocks * _SMALL else _LARGE
    while _bytes(tile) > memory.slot_bytes:
        tile //= 2
    constants: dict[str, Any] = {"TILE": tile, "GROUP": _GROUP, "BYTES": _bytes(tile), "TILES": 1}
    grid = (min(blocks, -(-x.numel() // (memory.size * tile))),)
    kernel: Any = fp8_kernel
    with torch.cuda.device_of(x):
        kernel[grid](
            x,
            x.numel(),
            memory.bases,
            memory.turns,
            memory.rank,
            MEMORY=memory.layout,
            num_warps=tile // 1024,
            **constants,
        )


def _bytes(tile: int) -> int:
    """The size of a record of ``tile`` values."""
    return tile + 4 * tile // _GROUP
