"""The Triton kernels that ``kernels`` launches: each program encodes or decodes some groups of one row.

``row`` is the number of the row of a program, and ``at`` that of a record. -1 stands for no record.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuples ROW and MEMORY, which pyright does not know of.

import triton
import triton.language as tl

from fcsd.kernels.bit_split.arithmetic import from_bf16, to_bf16
from fcsd.kernels.bit_split.values import eighths, encode_values, load_values, store_record, words_of, zeros


@triton.jit
def encode_kernel(rows, records, weight, places, ROW: tl.constexpr, TOP_K: tl.constexpr, EXACT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    inside = group < ROW.width // ROW.group
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    rest = ROW.padding + tl.arange(0, 16)
    x = tl.load(rows + row * ROW.width + column, mask=column < ROW.width, other=0.0).to(tl.float32)
    if weight is None:  # once for all places
        coded = encode_values(x, ROW, EXACT)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = row
        if places is not None:
            at = tl.load(places + row * TOP_K + k)
        if weight is not None:
            y = x * tl.load(weight + row * TOP_K + k).to(tl.float32)
            if EXACT:
                y = from_bf16(to_bf16(y))
            coded = encode_values(y, ROW, EXACT)
        record = records + at * ROW.bytes
        store_record(record, coded, word, group, inside & (at >= 0), ROW)
        if ROW.padding < ROW.bytes and tl.program_id(1) == 0:
            tl.store(record + rest, tl.zeros([16], tl.uint8), mask=(rest < ROW.bytes) & (at >= 0))


@triton.jit
def store_rows(out, x, inside):
    """Store values in the dtype of ``out``, bf16 or fp32."""
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out.to(tl.pointer_type(tl.uint16)), to_bf16(x), mask=inside)
    else:
        tl.store(out, x, mask=inside)


@triton.jit
def decode_kernel(rows, records, places, ROW: tl.constexpr, RANKS: tl.constexpr):
    row, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    inside = group < ROW.width // ROW.group
    word = words_of(group, ROW)
    column = tl.expand_dims(word, 3) * 8 + eighths()
    at = row
    if places is not None:
        at = tl.load(places + row).to(tl.int64)
        inside = inside & (at >= 0)
    x = load_values(records + at * ROW.bytes, word, group, inside, ROW)
    for rank in tl.static_range(1, RANKS):  # pyright: ignore[reportGeneralTypeIssues]
        x += load_values(records + (rank * count + at) * ROW.bytes, word, group, inside, ROW)
    store_rows(rows + row * ROW.width + column, x, column < ROW.width)


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
        x = load_values(records + at * ROW.bytes, word, group, inside, ROW)
        if rows.dtype.element_ty == tl.bfloat16:  # a row that is decoded alone has this dtype
            x = from_bf16(to_bf16(x))
        if weight is not None:
            x = x * tl.load(weight + row * TOP_K + k, mask=at >= 0, other=0.0).to(tl.float32)
        total += x
    store_rows(rows + row * ROW.width + column, total, column < ROW.width)


@triton.jit
def encode_sum_kernel(records, sums, ROW: tl.constexpr, RANKS: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * ROW.block + tl.arange(0, ROW.block)
    inside = group < ROW.width // ROW.group
    word = words_of(group, ROW)
    total = zeros(ROW)
    for rank in tl.static_range(RANKS):  # pyright: ignore[reportGeneralTypeIssues]
        total += load_values(records + (rank * rows + row) * ROW.bytes, word, group, inside, ROW)
    coded = encode_values(total, ROW, False)
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
        y = load_values(records + at * ROW.bytes, word, group, inside, ROW)
        if rows.dtype.element_ty == tl.bfloat16:
            y = from_bf16(to_bf16(y))
        x = tl.load(rows + row * ROW.width + column, mask=(column < ROW.width) & (at >= 0), other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(tl.sum(x * y, 3), 0), 1)
    tl.store(dots + pair, tl.sum(total, 0))
