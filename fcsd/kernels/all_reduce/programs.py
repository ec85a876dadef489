"""The Triton kernel of an all-reduce of bf16, fp16 or fp32 values, and what starts it.

In one shot, every block sends its values to all ranks and sums what arrives. In two shots, the values of a block are
divided among the ranks; each rank sums its share and sends the sum to all. A turn of a block is pipelined with the next
one: its values are being sent while those of the turn before it are summed.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuple MEMORY, which pyright does not know of.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels.all_reduce.memory import Memory, Shape, require_dtype

_SMALLEST = 2048  # values of a tile: 16 bytes of bf16 for each of 256 threads
_MOST_VALUES = 2**30  # of one launch, so that offsets fit into 32 bits


def all_reduce(x: Tensor, memory: Memory, shape: Shape) -> None:
    """Replace ``x`` by its sum over the ranks; on all ranks the same bits, added in fp32 in the order of ranks.

    The kernel starts on the current stream. All ranks make the same calls in the same order. Two calls on one memory
    must not run at the same time on a rank.

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
        options: dict[str, Any] = {"TILE": tile, "num_warps": min(16, tile // 256), "MEMORY": memory.layout}
        if len(part):
            with torch.cuda.device_of(part):
                arguments = part, len(part), memory.bases, memory.turns, memory.rank
                sum_kernel[(blocks,)](*arguments, **options, ONE_SHOT=shape.one_shot)  # pyright: ignore[reportArgumentType]


@triton.jit
def place_of(stage, block, turn, of, MEMORY: tl.constexpr):
    """The number of a place; see ``memory``."""
    return ((stage * MEMORY.blocks + block) * MEMORY.slots + (turn & (MEMORY.slots - 1))) * MEMORY.ranks + of


@triton.jit
def data_of(base, place, MEMORY: tl.constexpr):
    """The address of the data of a place, in the memory that begins at ``base``."""
    return base + MEMORY.data + place.to(tl.int64) * MEMORY.slot


@triton.jit
def signal(bases, me, stage, block, turn, MEMORY: tl.constexpr):
    """Tell the other ranks that this block has written the data of a turn."""
    tl.debug_barrier()  # all threads have written
    place = place_of(stage, block, turn, me, MEMORY)
    for step in range(1, MEMORY.ranks):
        flags = tl.load(bases + (me + step) % MEMORY.ranks).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + place, turn + 1, sem="release", scope="sys")


@triton.jit
def await_signals(bases, me, stage, block, turn, MEMORY: tl.constexpr):
    """Wait until the other ranks have written the data of a turn for this block."""
    flags = tl.load(bases + me).to(tl.pointer_type(tl.int32))
    for step in range(1, MEMORY.ranks):
        flag = flags + place_of(stage, block, turn, (me + step) % MEMORY.ranks, MEMORY)
        while tl.atomic_cas(flag, turn + 1, turn + 1, sem="acquire", scope="sys") != turn + 1:
            pass
    tl.debug_barrier()  # no thread reads before this one has seen the flags


@triton.jit
def _values_at(base, place, like, MEMORY: tl.constexpr):
    """The address of the data of a place, as a pointer to values of the dtype of ``like``."""
    pointer = data_of(base, place, MEMORY).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _push(x, n, bases, me, block, first, turn, MEMORY: tl.constexpr, ONE_SHOT: tl.constexpr, TILE: tl.constexpr):
    """Send this rank's values of a turn: all of them to all ranks, or to each rank its share."""
    within = tl.arange(0, TILE)
    place = place_of(0, block, first + turn, me, MEMORY)
    tile = turn * tl.num_programs(0) + block
    if ONE_SHOT:
        at = tile * TILE + within
        values = tl.load(x + at, mask=at < n)
        for step in range(1, MEMORY.ranks):
            base = tl.load(bases + (me + step) % MEMORY.ranks)
            tl.store(_values_at(base, place, x, MEMORY) + within, values, mask=at < n)
    else:
        for step in range(1, MEMORY.ranks):
            owner = (me + step) % MEMORY.ranks
            at = (tile * MEMORY.ranks + owner) * TILE + within
            values = tl.load(x + at, mask=at < n)
            tl.store(_values_at(tl.load(bases + owner), place, x, MEMORY) + within, values, mask=at < n)
    signal(bases, me, 0, block, first + turn, MEMORY)


@triton.jit
def _collect(x, n, bases, me, block, first, turn, MEMORY: tl.constexpr, TILE: tl.constexpr):
    """Write the sums of the other ranks over this rank's values."""
    within = tl.arange(0, TILE)
    await_signals(bases, me, 1, block, first + turn, MEMORY)
    for step in range(1, MEMORY.ranks):
        owner = (me + step) % MEMORY.ranks
        place = place_of(1, block, first + turn, owner, MEMORY)
        at = ((turn * tl.num_programs(0) + block) * MEMORY.ranks + owner) * TILE + within
        sums = tl.load(_values_at(tl.load(bases + me), place, x, MEMORY) + within, mask=at < n)
        tl.store(x + at, sums, mask=at < n)


@triton.jit(do_not_specialize=["me"])
def sum_kernel(x, n, bases, turns, me, MEMORY: tl.constexpr, ONE_SHOT: tl.constexpr, TILE: tl.constexpr):
    """Replace ``n`` values ``x`` by their sums over the ranks, which are added in fp32 in the order of ranks."""
    block, within = tl.program_id(0), tl.arange(0, TILE)
    first = tl.load(turns + block)
    own = tl.load(bases + me)
    RANKS: tl.constexpr = MEMORY.ranks
    SHARES: tl.constexpr = 1 if ONE_SHOT else MEMORY.ranks  # pyright: ignore[reportAssignmentType]
    count = tl.cdiv(n, tl.num_programs(0) * SHARES * TILE)
    _push(x, n, bases, me, block, first, 0, MEMORY, ONE_SHOT, TILE)
    for turn in range(count):
        if turn + 1 < count:
            _push(x, n, bases, me, block, first, turn + 1, MEMORY, ONE_SHOT, TILE)
        tile = turn * tl.num_programs(0) + block
        if not ONE_SHOT:
            tile = tile * MEMORY.ranks + me
        at = tile * TILE + within
        mine = tl.load(x + at, mask=at < n)
        await_signals(bases, me, 0, block, first + turn, MEMORY)
        total = tl.zeros([TILE], tl.float32)
        for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
            place = place_of(0, block, first + turn, rank, MEMORY)
            # This rank has not sent its own values to itself.
            theirs = tl.load(_values_at(own, place, x, MEMORY) + within, mask=(at < n) & (me != rank))
            total += tl.where(me == rank, mine, theirs).to(tl.float32)
        sums = total.to(x.dtype.element_ty)
        tl.store(x + at, sums, mask=at < n)
        if not ONE_SHOT:
            place = place_of(1, block, first + turn, me, MEMORY)
            for step in range(1, MEMORY.ranks):
                base = tl.load(bases + (me + step) % MEMORY.ranks)
                tl.store(_values_at(base, place, x, MEMORY) + within, sums, mask=at < n)
            signal(bases, me, 1, block, first + turn, MEMORY)
            if turn > 0:
                _collect(x, n, bases, me, block, first, turn - 1, MEMORY, TILE)
    if not ONE_SHOT:
        _collect(x, n, bases, me, block, first, count - 1, MEMORY, TILE)
    tl.store(turns + block, first + count)
