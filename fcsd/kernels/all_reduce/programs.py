"""The Triton kernel of an all-reduce of bf16, fp16 or fp32 values, and what starts it.

Every block sends its values to all ranks and sums what arrives. A turn of a block is pipelined with the next one: its
values are being sent while those of the turn before it are summed.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuple MEMORY, which pyright does not know of.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.all_reduce.memory import DTYPES, Memory

_SMALLEST = 2048  # values of a tile: 16 bytes of bf16 for each of 256 threads
_MOST_VALUES = 2**30  # of one launch, so that offsets fit into 32 bits


def all_reduce(x: Tensor, memory: Memory, most: int = 32) -> None:
    """Replace ``x`` by its sum over the ranks; on all ranks the same bits, added in fp32 in the order of ranks.

    The kernel starts on the current stream. All ranks make the same calls in the same order. Two calls on one memory
    must not run at the same time on a rank.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous.
        most: the most blocks, each of which occupies one SM; at most ``BLOCKS``. It changes no result, but must be the
            same on all ranks.

    Raises:
        ConfigError: the dtype is another one.
    """
    if x.dtype not in DTYPES:
        raise ConfigError(f"an all-reduce over symmetric memory sums bf16, fp16 and fp32, not {x.dtype}")
    largest = memory.slot_bytes // x.element_size()
    for part in x.view(-1).split(_MOST_VALUES):
        tile = _SMALLEST if len(part) <= 2 * _SMALLEST * most else largest
        blocks = min(most, -(-len(part) // tile))
        options: dict[str, Any] = {"TILE": tile, "num_warps": min(16, tile // 256), "MEMORY": memory.layout}
        if len(part):
            with torch.cuda.device_of(part):
                arguments = part, len(part), memory.bases, memory.turns, memory.rank
                sum_kernel[(blocks,)](*arguments, **options)


@triton.jit
def place_of(block, turn, of, MEMORY: tl.constexpr):
    """The number of a place; see ``memory``."""
    return (block * MEMORY.slots + (turn & (MEMORY.slots - 1))) * MEMORY.ranks + of


@triton.jit
def signal(bases, me, block, turn, MEMORY: tl.constexpr):
    """Tell the other ranks that this block has written the data of a turn."""
    tl.debug_barrier()  # all threads have written
    place = place_of(block, turn, me, MEMORY)
    for step in range(1, MEMORY.ranks):
        flags = tl.load(bases + (me + step) % MEMORY.ranks).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + place, turn + 1, sem="release", scope="sys")


@triton.jit
def await_signals(bases, me, block, turn, MEMORY: tl.constexpr):
    """Wait until the other ranks have written the data of a turn for this block."""
    flags = tl.load(bases + me).to(tl.pointer_type(tl.int32))
    for step in range(1, MEMORY.ranks):
        flag = flags + place_of(block, turn, (me + step) % MEMORY.ranks, MEMORY)
        while tl.atomic_cas(flag, turn + 1, turn + 1, sem="acquire", scope="sys") != turn + 1:
            pass
    tl.debug_barrier()  # no thread reads before this one has seen the flags


@triton.jit
def _values_at(base, place, like, MEMORY: tl.constexpr):
    """Where the data of a place are in the memory that begins at ``base``: values of the dtype of ``like``."""
    address = base + MEMORY.data + place.to(tl.int64) * MEMORY.slot
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _push(x, n, bases, me, block, first, turn, MEMORY: tl.constexpr, TILE: tl.constexpr):
    """Send this rank's values of a turn to all ranks."""
    within = tl.arange(0, TILE)
    place = place_of(block, first + turn, me, MEMORY)
    at = (turn * tl.num_programs(0) + block) * TILE + within
    values = tl.load(x + at, mask=at < n)
    for step in range(1, MEMORY.ranks):
        base = tl.load(bases + (me + step) % MEMORY.ranks)
        tl.store(_values_at(base, place, x, MEMORY) + within, values, mask=at < n)
    signal(bases, me, block, first + turn, MEMORY)


@triton.jit(do_not_specialize=["me"])
def sum_kernel(x, n, bases, turns, me, MEMORY: tl.constexpr, TILE: tl.constexpr):
    """Replace ``n`` values ``x`` by their sums over the ranks, which are added in fp32 in the order of ranks."""
    block, within = tl.program_id(0), tl.arange(0, TILE)
    first = tl.load(turns + block)
    own = tl.load(bases + me)
    RANKS: tl.constexpr = MEMORY.ranks
    count = tl.cdiv(n, tl.num_programs(0) * TILE)
    _push(x, n, bases, me, block, first, 0, MEMORY, TILE)
    for turn in range(count):
        if turn + 1 < count:
            _push(x, n, bases, me, block, first, turn + 1, MEMORY, TILE)
        at = (turn * tl.num_programs(0) + block) * TILE + within
        mine = tl.load(x + at, mask=at < n)
        await_signals(bases, me, block, first + turn, MEMORY)
        total = tl.zeros([TILE], tl.float32)
        for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
            place = place_of(block, first + turn, rank, MEMORY)
            # This rank has not sent its own values to itself.
            theirs = tl.load(_values_at(own, place, x, MEMORY) + within, mask=(at < n) & (me != rank))
            total += tl.where(me == rank, mine, theirs).to(tl.float32)
        tl.store(x + at, total.to(x.dtype.element_ty), mask=at < n)
    tl.store(turns + block, first + count)
