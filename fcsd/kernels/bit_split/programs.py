"""The Triton kernels that ``kernels`` launches: each program encodes or decodes some groups of one row.

``row`` is the number of the row of a program, and ``at`` that of a record. -1 stands for no record.
"""

import triton
import triton.language as tl

from fcsd.kernels.bit_split.arithmetic import beside, from_bf16, to_bf16, uniform
from fcsd.kernels.bit_split.values import eighths, encode_values, load_values, store_record, words_of


@triton.jit(do_not_specialize=["seed", "step_number", "lane"])
def encode_kernel(
    rows,
    records,
    weight,
    places,
    pair,
    seed,
    step_number,
    lane,
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
    PADDING: tl.constexpr,
    TOP_K: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    place = column % GROUP
    rest = PADDING + tl.arange(0, 16)
    x = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    noise = None
    if pair is not None:
        noise = uniform(seed, word, tl.load(pair + row), step_number, lane, eighths())
    if weight is None:  # once for all places
        codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
            x, place, noise, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, EXACT
        )
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = row
        if places is not None:
            at = tl.load(places + row * TOP_K + k)
        if weight is not None:
            y = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
            if EXACT:
                y = tl.where(y == y, from_bf16(to_bf16(y)), y)
            codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
                y, place, noise, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, EXACT
            )
        record = records + at * BYTES
        store_record(
            record,
            codes,
            scale,
            zero,
            least_bits,
            greatest_bits,
            least_at,
            greatest_at,
            word,
            group,
            inside & (at >= 0),
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
        if PADDING < BYTES and tl.program_id(1) == 0:
            tl.store(record + rest, tl.zeros([16], tl.uint8), mask=(rest < BYTES) & (at >= 0))


@triton.jit
def store_rows(out, x, broken, inside):
    """Store values, bf16 or fp32; those of broken groups are NaN."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = tl.where(broken, 0x7FC0, to_bf16(x)).to(tl.uint16)
        tl.store(out.to(tl.pointer_type(tl.uint16)), bits, mask=inside)
    else:
        tl.store(out, tl.where(broken, float("nan"), x), mask=inside)


@triton.jit
def decode_kernel(
    rows,
    records,
    places,
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
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    at = row
    if places is not None:
        at = tl.load(places + row).to(tl.int64)
        inside = inside & (at >= 0)
    x, broken = load_values(
        records + at * BYTES,
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
    if places is not None:
        x = tl.where(at >= 0, x, 0.0)
        broken = broken & (at >= 0)
    store_rows(rows + row * WIDTH + column, x, beside(broken), column < WIDTH)


@triton.jit
def sum_kernel(
    rows,
    records,
    weight,
    places,
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
    TOP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = words_of(group, GROUP, PARTS)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    LANES: tl.constexpr = GROUP // (8 * PARTS)  # pyright: ignore[reportOperatorIssue]
    total = tl.zeros([PARTS, BLOCK, LANES, 8], tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.load(places + row * TOP_K + k)
        inside = (group < WIDTH // GROUP) & (at >= 0)
        x, broken = load_values(
            records + at * BYTES,
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
        x = tl.where(beside(broken & inside), float("nan"), x)
        if rows.dtype.element_ty == tl.bfloat16:  # a row that is decoded alone has this dtype
            x = tl.where(x == x, from_bf16(to_bf16(x)), x)
        if weight is not None:
            x = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
        total += tl.where(at >= 0, x, 0.0)
    store_rows(rows + row * WIDTH + column, total, total != total, column < WIDTH)


@triton.jit
def encode_sum_kernel(
    records,
    sums,
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
    PADDING: tl.constexpr,
    RANKS: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = words_of(group, GROUP, PARTS)
    place = (tl.expand_dims(word, 3) * 8 + eighths()) % GROUP
    LANES: tl.constexpr = GROUP // (8 * PARTS)  # pyright: ignore[reportOperatorIssue]
    total = tl.zeros([PARTS, BLOCK, LANES, 8], tl.float32)
    for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
        x, broken = load_values(
            records + (rank * rows + row) * BYTES,
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
        total += tl.where(beside(broken), float("nan"), x)
    codes, scale, zero, least_bits, greatest_bits, least_at, greatest_at = encode_values(
        total, place, None, BITS, SPIKES, INTEGER, CLIP, ROUNDING, GROUP, False
    )
    record = sums + row * BYTES
    store_record(
        record,
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
    if PADDING < BYTES and tl.program_id(1) == 0:
        rest = PADDING + tl.arange(0, 16)
        tl.store(record + rest, tl.zeros([16], tl.uint8), mask=rest < BYTES)


@triton.jit
def dots_kernel(
    rows,
    records,
    places,
    dots,
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
    TOP_K: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row, at = pair // TOP_K, tl.load(places + pair)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH // GROUP, BLOCK):
        group = start + tl.arange(0, BLOCK)
        inside = (group < WIDTH // GROUP) & (at >= 0)
        word = words_of(group, GROUP, PARTS)
        column = tl.expand_dims(word, 3) * 8 + eighths()
        y, broken = load_values(
            records + at * BYTES,
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
        y = tl.where(beside(broken & inside), float("nan"), y)
        if rows.dtype.element_ty == tl.bfloat16:
            y = tl.where(y == y, from_bf16(to_bf16(y)), y)
        x = tl.load(rows + row * WIDTH + column, mask=(column < WIDTH) & (at >= 0), other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(tl.sum(x * y, 3), 0), 1)
    tl.store(dots + pair, tl.sum(total, 0))
