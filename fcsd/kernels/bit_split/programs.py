"""The Triton kernels that ``kernels`` launches: each program encodes or decodes some groups of one row.

``row`` is the number of the row of a program, and ``at`` that of a record. -1 stands for no record.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuples ROW and MEMORY, which pyright does not know of.

import triton
import triton.language as tl

from fcsd.kernels.bit_split.arithmetic import beside, from_bf16, to_bf16, uniform
from fcsd.kernels.bit_split.values import eighths, encode_values, load_values, store_record, words_of, zeros


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
    ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    inside = group < ROW.width // ROW.group
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    place = column % ROW.group
    rest = ROW.padding + tl.arange(0, 16)
    x = tl.load(rows + row * ROW.width + column, mask=column < ROW.width, other=0.0).to(tl.float32)
    noise = None
    if pair is not None:
        noise = uniform(seed, word, tl.load(pair + row), step_number, lane, eighths())
    if weight is None:  # once for all places
        coded = encode_values(x, place, noise, ROW, EXACT)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = row
        if places is not None:
            at = tl.load(places + row * TOP_K + k)
        if weight is not None:
            y = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
            if EXACT:
                y = tl.where(y == y, from_bf16(to_bf16(y)), y)
            coded = encode_values(y, place, noise, ROW, EXACT)
        record = records + at * ROW.bytes
        store_record(record, coded, word, group, inside & (at >= 0), ROW)
        if ROW.padding < ROW.bytes and tl.program_id(1) == 0:
            tl.store(record + rest, tl.zeros([16], tl.uint8), mask=(rest < ROW.bytes) & (at >= 0))


@triton.jit
def store_rows(out, x, broken, inside):
    """Store values, bf16 or fp32; those of broken groups are NaN."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = tl.where(broken, 0x7FC0, to_bf16(x)).to(tl.uint16)
        tl.store(out.to(tl.pointer_type(tl.uint16)), bits, mask=inside)
    else:
        tl.store(out, tl.where(broken, float("nan"), x), mask=inside)


@triton.jit
def decode_kernel(rows, records, places, ROW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    inside = group < ROW.width // ROW.group
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    at = row
    if places is not None:
        at = tl.load(places + row).to(tl.int64)
        inside = inside & (at >= 0)
    x, broken = load_values(records + at * ROW.bytes, word, group, inside, ROW)
    if places is not None:
        x = tl.where(at >= 0, x, 0.0)
        broken = broken & (at >= 0)
    store_rows(rows + row * ROW.width + column, x, beside(broken), column < ROW.width)


@triton.jit
def sum_kernel(rows, records, weight, places, ROW: tl.constexpr, TOP_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    total = zeros(ROW)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.load(places + row * TOP_K + k)
        inside = (group < ROW.width // ROW.group) & (at >= 0)
        x, broken = load_values(records + at * ROW.bytes, word, group, inside, ROW)
        x = tl.where(beside(broken & inside), float("nan"), x)
        if rows.dtype.element_ty == tl.bfloat16:  # a row that is decoded alone has this dtype
            x = tl.where(x == x, from_bf16(to_bf16(x)), x)
        if weight is not None:
            x = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
        total += tl.where(at >= 0, x, 0.0)
    store_rows(rows + row * ROW.width + column, total, total != total, column < ROW.width)


@triton.jit
def encode_sum_kernel(records, sums, ROW: tl.constexpr, RANKS: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    inside = group < ROW.width // ROW.group
    word = words_of(group, ROW)
    place = (tl.expand_dims(word, 3) * 8 + eighths()) % ROW.group
    total = zeros(ROW)
    for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
        x, broken = load_values(records + (rank * rows + row) * ROW.bytes, word, group, inside, ROW)
        total += tl.where(beside(broken), float("nan"), x)
    coded = encode_values(total, place, None, ROW, False)
    record = sums + row * ROW.bytes
    store_record(record, coded, word, group, inside, ROW)
    if ROW.padding < ROW.bytes and tl.program_id(1) == 0:
        rest = ROW.padding + tl.arange(0, 16)
        tl.store(record + rest, tl.zeros([16], tl.uint8), mask=rest < ROW.bytes)


@triton.jit
def dots_kernel(rows, records, places, dots, ROW: tl.constexpr, TOP_K: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    row, at = pair // TOP_K, tl.load(places + pair)
    BLOCK: tl.constexpr = ROW.block
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, ROW.width // ROW.group, ROW.block):
        group = start + tl.arange(0, ROW.block)
        inside = (group < ROW.width // ROW.group) & (at >= 0)
        word = words_of(group, ROW)
        column = tl.expand_dims(word, 3) * 8 + eighths()
        y, broken = load_values(records + at * ROW.bytes, word, group, inside, ROW)
        y = tl.where(beside(broken & inside), float("nan"), y)
        if rows.dtype.element_ty == tl.bfloat16:
            y = tl.where(y == y, from_bf16(to_bf16(y)), y)
        x = tl.load(rows + row * ROW.width + column, mask=(column < ROW.width) & (at >= 0), other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(tl.sum(x * y, 3), 0), 1)
    tl.store(dots + pair, tl.sum(total, 0))
