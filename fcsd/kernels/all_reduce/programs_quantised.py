"""The Triton kernel of a quantised all-reduce: encoding, wire and sum are pipelined in one launch.

A tile of ``WIDTH`` values is one record of ``bit_split``. Groups are encoded independently of each other, so it changes
no bit of the result how values are divided into tiles. Every value is decoded from a record, this rank's own too, and
every sum is encoded and decoded once, in one shot as well as in two. All ranks therefore end with the same bits, which
are those of ``parallel.tensor.simulated``.
"""

import triton
import triton.language as tl

from fcsd.kernels.all_reduce.programs import await_signals, data_of, place_of, signal
from fcsd.kernels.bit_split.arithmetic import beside
from fcsd.kernels.bit_split.programs import store_rows
from fcsd.kernels.bit_split.values import eighths, encode_values, load_values, store_record, words_of


@triton.jit
def _record(base, place, tile, BYTES: tl.constexpr, DATA: tl.constexpr, SLOT: tl.constexpr):
    """The record of the tile with this number in a place."""
    pointer = (data_of(base, place, DATA, SLOT) + tile * BYTES).to(tl.pointer_type(tl.uint8))
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
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
    EXACT: tl.constexpr,
    RANKS: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    TILES: tl.constexpr,
    SLOT: tl.constexpr,
    DATA: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Encode this rank's values of a turn, and send all of them to all ranks, or to each rank its share."""
    SHARES: tl.constexpr = 1 if ONE_SHOT else RANKS  # pyright: ignore[reportAssignmentType]
    RECEIVERS: tl.constexpr = RANKS if ONE_SHOT else 1  # pyright: ignore[reportAssignmentType]
    group = tl.arange(0, BLOCK)
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    place = place_of(0, block, first + turn, me, RANKS, BLOCKS, SLOTS)
    for number in range(SHARES * TILES):
        owner = (me + number // TILES) % SHARES
        tile = ((turn * tl.num_programs(0) + block) * SHARES + owner) * TILES + number % TILES
        at = tile * WIDTH + column
        values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
            values, column % GROUP, None, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, EXACT
        )
        for step in range(RECEIVERS):
            receiver = owner
            if ONE_SHOT:
                receiver = (me + step) % RANKS
            store_record(
                _record(tl.load(bases + receiver), place, number % TILES, BYTES, DATA, SLOT),
                codes,
                scale,
                zero,
                least_bits,
                greatest_bits,
                least_at,
                greatest_at,
                word,
                group,
                tile * BLOCK + group < n // GROUP,
                WIDTH,
                BITS,
                GROUP,
                SPIKES,
                INTEGER,
                SCALES,
                ZEROS,
                ENDS,
                INDICES,
            )
    signal(bases, me, 0, block, first + turn, RANKS, BLOCKS, SLOTS)


@triton.jit
def _collect(
    x,
    n,
    bases,
    me,
    block,
    first,
    turn,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    TILES: tl.constexpr,
    SLOT: tl.constexpr,
    DATA: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Decode the sums of a turn over this rank's values."""
    SHARES: tl.constexpr = 1 if ONE_SHOT else RANKS  # pyright: ignore[reportAssignmentType]
    group = tl.arange(0, BLOCK)
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    if ONE_SHOT:
        tl.debug_barrier()  # this block has written the records itself
    else:
        await_signals(bases, me, 1, block, first + turn, RANKS, BLOCKS, SLOTS)
    own = tl.load(bases + me)
    for number in range(SHARES * TILES):
        owner = (me + number // TILES) % RANKS
        share = owner
        if ONE_SHOT:
            share = 0
        tile = ((turn * tl.num_programs(0) + block) * SHARES + share) * TILES + number % TILES
        place = place_of(1, block, first + turn, owner, RANKS, BLOCKS, SLOTS)
        sums, broken = load_values(
            _record(own, place, number % TILES, BYTES, DATA, SLOT),
            word,
            group,
            tile * BLOCK + group < n // GROUP,
            WIDTH,
            BITS,
            GROUP,
            SPIKES,
            INTEGER,
            SCALES,
            ZEROS,
            ENDS,
            INDICES,
            PARTS,
        )
        at = tile * WIDTH + column
        store_rows(x + at, sums, beside(broken), at < n)


@triton.jit(do_not_specialize=["me"])
def sum_kernel(
    x,
    n,
    bases,
    turns,
    me,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
    PADDING: tl.constexpr,
    EXACT: tl.constexpr,
    RANKS: tl.constexpr,
    ONE_SHOT: tl.constexpr,
    TILES: tl.constexpr,
    SLOT: tl.constexpr,
    DATA: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Replace ``n`` values ``x`` by their quantised sums over the ranks, which are added in the order of ranks.

    ``PADDING`` is unused: nothing reads the padding of a record here.
    """
    block = tl.program_id(0)
    first = tl.load(turns + block)
    own = tl.load(bases + me)
    SHARES: tl.constexpr = 1 if ONE_SHOT else RANKS  # pyright: ignore[reportAssignmentType]
    LANES: tl.constexpr = GROUP // (8 * PARTS)  # pyright: ignore[reportOperatorIssue]
    group = tl.arange(0, BLOCK)
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    count = tl.cdiv(n, tl.num_programs(0) * SHARES * TILES * WIDTH)
    for ahead in range(count + 1):
        if ahead < count:
            _push(
                x,
                n,
                bases,
                me,
                block,
                first,
                ahead,
                WIDTH,
                BITS,
                GROUP,
                SPIKES,
                INTEGER,
                SCALES,
                ZEROS,
                ENDS,
                INDICES,
                PARTS,
                BYTES,
                BLOCK,
                CLIP,
                ROUNDING,
                EXACT,
                RANKS,
                ONE_SHOT,
                TILES,
                SLOT,
                DATA,
                BLOCKS,
                SLOTS,
            )
        turn = ahead - 1
        if turn >= 0:
            await_signals(bases, me, 0, block, first + turn, RANKS, BLOCKS, SLOTS)
            for number in range(TILES):
                share = me
                if ONE_SHOT:
                    share = 0
                tile = ((turn * tl.num_programs(0) + block) * SHARES + share) * TILES + number
                inside = tile * BLOCK + group < n // GROUP
                total = tl.zeros([PARTS, BLOCK, LANES, 8], tl.float32)
                for rank in range(RANKS):
                    place = place_of(0, block, first + turn, rank, RANKS, BLOCKS, SLOTS)
                    values, broken = load_values(
                        _record(own, place, number, BYTES, DATA, SLOT),
                        word,
                        group,
                        inside,
                        WIDTH,
                        BITS,
                        GROUP,
                        SPIKES,
                        INTEGER,
                        SCALES,
                        ZEROS,
                        ENDS,
                        INDICES,
                        PARTS,
                    )
                    total += tl.where(beside(broken), float("nan"), values)
                codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
                    total, column % GROUP, None, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, False
                )
                place = place_of(1, block, first + turn, me, RANKS, BLOCKS, SLOTS)
                for step in range(SHARES):  # to this rank alone, or to all ranks
                    store_record(
                        _record(tl.load(bases + (me + step) % RANKS), place, number, BYTES, DATA, SLOT),
                        codes,
                        scale,
                        zero,
                        least_bits,
                        greatest_bits,
                        least_at,
                        greatest_at,
                        word,
                        group,
                        inside,
                        WIDTH,
                        BITS,
                        GROUP,
                        SPIKES,
                        INTEGER,
                        SCALES,
                        ZEROS,
                        ENDS,
                        INDICES,
                    )
            if not ONE_SHOT:
                signal(bases, me, 1, block, first + turn, RANKS, BLOCKS, SLOTS)
        done = turn
        if not ONE_SHOT:
            done = turn - 1
        if done >= 0:
            _collect(
                x,
                n,
                bases,
                me,
                block,
                first,
                done,
                WIDTH,
                BITS,
                GROUP,
                SPIKES,
                INTEGER,
                SCALES,
                ZEROS,
                ENDS,
                INDICES,
                PARTS,
                BYTES,
                BLOCK,
                RANKS,
                ONE_SHOT,
                TILES,
                SLOT,
                DATA,
                BLOCKS,
                SLOTS,
            )
    if not ONE_SHOT:
        _collect(
            x,
            n,
            bases,
            me,
            block,
            first,
            count - 1,
            WIDTH,
            BITS,
            GROUP,
            SPIKES,
            INTEGER,
            SCALES,
            ZEROS,
            ENDS,
            INDICES,
            PARTS,
            BYTES,
            BLOCK,
            RANKS,
            ONE_SHOT,
            TILES,
            SLOT,
            DATA,
            BLOCKS,
            SLOTS,
        )
    tl.store(turns + block, first + count)
