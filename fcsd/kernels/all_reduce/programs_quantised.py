"""The Triton kernels of a quantised all-reduce: encoding, sending and sum in one launch.

``sum_kernel`` pipelines turns of a few records. In ``large_kernel`` a block encodes all its records, then sums all of
them, then decodes all of them. Many small blocks keep the SMs busy, as some compute while others wait.

A tile of ``width`` values is one record of ``bit_split``. Groups are encoded independently of each other, so it changes
no bit of the result how values are divided into tiles. Every value is decoded from a record, this rank's own too, and
every sum is encoded and decoded once, in one shot as well as in two. All ranks therefore end with the same bits, which
are those of ``parallel.quantised.simulated_all_reduce``.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuples ROW and MEMORY, which pyright does not know of.

import triton
import triton.language as tl

from fcsd.kernels.all_reduce.programs import await_signals, data_of, place_of, signal
from fcsd.kernels.bit_split.programs import store_rows
from fcsd.kernels.bit_split.values import eighths, encode_values, load_values, store_record, words_of, zeros


@triton.jit
def _record(base, place, tile, ROW: tl.constexpr, MEMORY: tl.constexpr):
    """The record of the tile with this number in a place."""
    pointer = (data_of(base, place, MEMORY) + tile * ROW.bytes).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _push(
    x,
    n,
    bases,
    me,
    block,
    first,
    turn,
    ROW: tl.constexpr,
    EXACT: tl.constexpr,
    MEMORY: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Encode this rank's values of a turn, and send all of them to all ranks, or to each rank its share."""
    SHARES: tl.constexpr = 1 if ONE_SHOT else MEMORY.ranks  # pyright: ignore[reportAssignmentType]
    RECEIVERS: tl.constexpr = MEMORY.ranks if ONE_SHOT else 1  # pyright: ignore[reportAssignmentType]
    group = tl.arange(0, ROW.block)
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    place = place_of(0, block, first + turn, me, MEMORY)
    for number in range(SHARES * TILES):
        owner = (me + number // TILES) % SHARES
        tile = ((turn * tl.num_programs(0) + block) * SHARES + owner) * TILES + number % TILES
        at = tile * ROW.width + column
        values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        coded = encode_values(values, None, ROW, EXACT)
        for step in range(RECEIVERS):
            receiver = owner
            if ONE_SHOT:
                receiver = (me + step) % MEMORY.ranks
            store_record(
                _record(tl.load(bases + receiver), place, number % TILES, ROW, MEMORY),
                coded,
                word,
                group,
                tile * ROW.block + group < n // ROW.group,
                ROW,
            )
    signal(bases, me, 0, block, first + turn, MEMORY)


@triton.jit
def _collect(
    x,
    n,
    bases,
    me,
    block,
    first,
    turn,
    ROW: tl.constexpr,
    MEMORY: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Decode the sums of a turn over this rank's values."""
    SHARES: tl.constexpr = 1 if ONE_SHOT else MEMORY.ranks  # pyright: ignore[reportAssignmentType]
    group = tl.arange(0, ROW.block)
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    if ONE_SHOT:
        tl.debug_barrier()  # this block has written the records itself
    else:
        await_signals(bases, me, 1, block, first + turn, MEMORY)
    own = tl.load(bases + me)
    for number in range(SHARES * TILES):
        owner = (me + number // TILES) % MEMORY.ranks
        share = owner
        if ONE_SHOT:
            share = 0
        tile = ((turn * tl.num_programs(0) + block) * SHARES + share) * TILES + number % TILES
        place = place_of(1, block, first + turn, owner, MEMORY)
        sums = load_values(
            _record(own, place, number % TILES, ROW, MEMORY),
            word,
            group,
            tile * ROW.block + group < n // ROW.group,
            ROW,
        )
        at = tile * ROW.width + column
        store_rows(x + at, sums, at < n)


@triton.jit(do_not_specialize=["me"])
def sum_kernel(
    x,
    n,
    bases,
    turns,
    me,
    ROW: tl.constexpr,
    EXACT: tl.constexpr,
    MEMORY: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Replace ``n`` values ``x`` by their quantised sums over the ranks, which are added in the order of ranks."""
    block = tl.program_id(0)
    first = tl.load(turns + block)
    own = tl.load(bases + me)
    SHARES: tl.constexpr = 1 if ONE_SHOT else MEMORY.ranks  # pyright: ignore[reportAssignmentType]
    group = tl.arange(0, ROW.block)
    word = words_of(group, ROW)
    count = tl.cdiv(n, tl.num_programs(0) * SHARES * TILES * ROW.width)
    for ahead in range(count + 1):
        if ahead < count:
            _push(x, n, bases, me, block, first, ahead, ROW, EXACT, MEMORY, ONE_SHOT, TILES)
        turn = ahead - 1
        if turn >= 0:
            await_signals(bases, me, 0, block, first + turn, MEMORY)
            for number in range(TILES):
                share = me
                if ONE_SHOT:
                    share = 0
                tile = ((turn * tl.num_programs(0) + block) * SHARES + share) * TILES + number
                inside = tile * ROW.block + group < n // ROW.group
                total = zeros(ROW)
                for rank in range(MEMORY.ranks):
                    place = place_of(0, block, first + turn, rank, MEMORY)
                    total += load_values(_record(own, place, number, ROW, MEMORY), word, group, inside, ROW)
                coded = encode_values(total, None, ROW, False)
                place = place_of(1, block, first + turn, me, MEMORY)
                for step in range(SHARES):  # to this rank alone, or to all ranks
                    store_record(
                        _record(tl.load(bases + (me + step) % MEMORY.ranks), place, number, ROW, MEMORY),
                        coded,
                        word,
                        group,
                        inside,
                        ROW,
                    )
            if not ONE_SHOT:
                signal(bases, me, 1, block, first + turn, MEMORY)
        done = turn
        if not ONE_SHOT:
            done = turn - 1
        if done >= 0:
            _collect(x, n, bases, me, block, first, done, ROW, MEMORY, ONE_SHOT, TILES)
    if not ONE_SHOT:
        _collect(x, n, bases, me, block, first, count - 1, ROW, MEMORY, ONE_SHOT, TILES)
    tl.store(turns + block, first + count)


@triton.jit
def _in_half(base, of, number, count, ROW: tl.constexpr):
    """The record ``number`` of the ``count`` of rank ``of``, in a half of a room that begins at ``base``."""
    pointer = (base + (of * count + number) * ROW.bytes).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16)


@triton.jit(do_not_specialize=["me"])
def large_kernel(
    x,
    n,
    rooms,
    flags,
    turns,
    me,
    ROW: tl.constexpr,
    EXACT: tl.constexpr,
    MEMORY: tl.constexpr,
    HALF: tl.constexpr,
):
    """The same in two shots of a single turn, through rooms; a block waits twice, however many values it has."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    first = tl.load(turns + block)
    own = tl.load(rooms + me)
    group = tl.arange(0, ROW.block)
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    groups = n // ROW.group
    count = tl.cdiv(n, MEMORY.ranks * ROW.width)  # records of a share
    for step in range(1, MEMORY.ranks + 1):
        owner = (me + step) % MEMORY.ranks
        there = tl.load(rooms + owner)
        for number in range(block, count, blocks):
            tile = owner * count + number
            at = tile * ROW.width + column
            coded = encode_values(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32), None, ROW, EXACT)
            record = _in_half(there, me, number, count, ROW)
            store_record(record, coded, word, group, tile * ROW.block + group < groups, ROW)
    signal(flags, me, 0, block, first, MEMORY)
    await_signals(flags, me, 0, block, first, MEMORY)
    for number in range(block, count, blocks):
        inside = (me * count + number) * ROW.block + group < groups
        total = zeros(ROW)
        for rank in range(MEMORY.ranks):
            total += load_values(_in_half(own, rank, number, count, ROW), word, group, inside, ROW)
        coded = encode_values(total, None, ROW, False)
        for step in range(1, MEMORY.ranks + 1):
            there = tl.load(rooms + (me + step) % MEMORY.ranks)
            store_record(_in_half(there + HALF, me, number, count, ROW), coded, word, group, inside, ROW)
    signal(flags, me, 1, block, first, MEMORY)
    await_signals(flags, me, 1, block, first, MEMORY)
    for step in range(1, MEMORY.ranks + 1):
        owner = (me + step) % MEMORY.ranks
        for number in range(block, count, blocks):
            tile = owner * count + number
            at = tile * ROW.width + column
            record = _in_half(own + HALF, owner, number, count, ROW)
            sums = load_values(record, word, group, tile * ROW.block + group < groups, ROW)
            store_rows(x + at, sums, at < n)
    tl.store(turns + block, first + 1)
