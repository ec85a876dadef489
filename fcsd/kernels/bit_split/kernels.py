"""Encodes and decodes records by Triton kernels, which equal ``reference`` bit for bit.

This holds for compiled kernels and for Triton's interpreter. A program holds some groups of one row as
``[groups, group / 8, 8]``: the eight values of the last axis are one word of each plane. The arithmetic is chosen so
that every backend computes the same bits: divisions are correctly rounded (one per group), and there is no fused
multiply-add, no logarithm and no atomic operation. Numbers are rounded to bf16 by integer arithmetic, because a cast to
bf16 in the interpreter drops bits instead of rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels.bit_split.arithmetic import (
    beside,
    code_of,
    from_bf16,
    greatest,
    least,
    nearest,
    numbers,
    step_of,
    to_bf16,
    uniform,
    whole,
)
from fcsd.kernels.bit_split.draws import Draws
from fcsd.kernels.bit_split.format import Format

_MOST_VALUES = 2048  # the largest number of values that a program holds at once


def encode(rows: Tensor, format: Format, draws: Draws | None = None) -> Tensor:
    """Encode rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[n, row_bytes]``; ``draws`` as in ``codec.encode``.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    layout = format.layout(rows.shape[1])
    records = rows.new_empty(len(rows), layout.bytes, dtype=torch.uint8)
    key = {"pair": None, "seed": 0, "step_number": 0, "lane": 0}
    if draws is not None:
        key = {"pair": draws.pair.contiguous(), "seed": draws.seed, "step_number": draws.step, "lane": draws.lane}
    _launch(_encode_kernel, rows.contiguous(), records, format, CLIP=format.clip, ROUNDING=format.rounding, **key)
    return records


def decode(records: Tensor, format: Format, width: int, dtype: torch.dtype) -> Tensor:
    """Decode records, uint8 ``[n, row_bytes]``, to rows ``[n, width]`` of ``dtype``, bf16 or fp32.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    rows = records.new_empty(len(records), width, dtype=dtype)
    _launch(_decode_kernel, rows, records.contiguous(), format)
    return rows


def _launch(kernel: triton.JITFunction, rows: Tensor, records: Tensor, format: Format, **constants: object) -> None:
    """Start a kernel with one program for each ``_MOST_VALUES`` values of a row."""
    count, width = rows.shape
    if count == 0:
        return
    layout, groups = format.layout(width), width // format.group
    block = min(_MOST_VALUES // format.group, triton.next_power_of_2(groups))
    with torch.cuda.device_of(rows):
        kernel[(count, triton.cdiv(groups, block))](
            rows,
            records,
            WIDTH=width,
            BITS=format.bits,
            GROUP=format.group,
            SPIKES=format.spikes,
            INTEGER=format.meta == "int",
            SCALES=layout.scales,
            ZEROS=layout.zeros,
            ENDS=layout.spikes,
            INDICES=layout.indices,
            PADDING=layout.end,
            BYTES=layout.bytes,
            BLOCK=block,
            enable_fp_fusion=False,
            **constants,
        )


@triton.jit
def _store_plane(plane, word, codes, eighth, inside, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Store ``BITS`` bits of each code, from bit ``SHIFT`` on; ``word`` numbers the blocks of eight values in a row."""
    MASK: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportOperatorIssue]
    fields = ((codes >> SHIFT) & MASK).to(tl.uint32)
    words = tl.sum(fields << (eighth * BITS).to(tl.uint32), 2)
    if BITS == 4:
        tl.store(plane.to(tl.pointer_type(tl.uint32)) + word, words, mask=inside)
    elif BITS == 2:
        tl.store(plane.to(tl.pointer_type(tl.uint16)) + word, words.to(tl.uint16), mask=inside)
    else:
        tl.store(plane + word, words.to(tl.uint8), mask=inside)


@triton.jit
def _load_plane(plane, word, eighth, inside, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Load the bits of each code that ``_store_plane`` stored, shifted to their place in the code."""
    if BITS == 4:
        words = tl.load(plane.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)
    elif BITS == 2:
        words = tl.load(plane.to(tl.pointer_type(tl.uint16)) + word, mask=inside, other=0).to(tl.uint32)
    else:
        words = tl.load(plane + word, mask=inside, other=0).to(tl.uint32)
    fields = tl.expand_dims(words, 2) >> (eighth * BITS).to(tl.uint32)
    MASK: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportOperatorIssue]
    return (fields & MASK).to(tl.int32) << SHIFT


@triton.jit(do_not_specialize=["seed", "step_number", "lane"])
def _encode_kernel(
    rows,
    records,
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
    PADDING: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    record = records + row * BYTES
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    words_inside = inside[:, None] & (word >= 0)
    eighth = tl.arange(0, 8)[None, None, :]
    place = tl.arange(0, GROUP // 8)[None, :, None] * 8 + eighth
    LEVELS: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportOperatorIssue]

    column = tl.expand_dims(word, 2) * 8 + eighth
    x = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    broken = greatest((exponent == 0x7F800000).to(tl.int32)) != 0
    x = tl.where((exponent == 0x7F800000) | (exponent == 0), 0.0, x)

    if SPIKES:
        ends = (record + ENDS).to(tl.pointer_type(tl.uint16))
        COUNT: tl.constexpr = WIDTH // GROUP
        low, high = least(x), greatest(x)
        low_at = least(tl.where(x == beside(low), place, GROUP))
        high_at = least(tl.where(x == beside(high), place, GROUP))
        x = tl.where((place == beside(low_at)) | (place == beside(high_at)), 0.0, x)
        tl.store(ends + group, to_bf16(low).to(tl.uint16), mask=inside)
        tl.store(ends + COUNT + group, to_bf16(high).to(tl.uint16), mask=inside)
        indices = numbers(record + INDICES, INTEGER)
        tl.store(indices + group, low_at.to(indices.dtype.element_ty), mask=inside)
        tl.store(indices + COUNT + group, high_at.to(indices.dtype.element_ty), mask=inside)

    low, high = least(x) * CLIP, greatest(x) * CLIP
    noise = None
    if pair is not None:
        noise = uniform(seed, word, tl.load(pair + row), step_number, lane, eighth)
    scales, zeros = numbers(record + SCALES, INTEGER), numbers(record + ZEROS, INTEGER)
    levels, ones = tl.full([BLOCK], LEVELS, tl.float32), tl.full([BLOCK], 1.0, tl.float32)
    if INTEGER:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
        code = code_of(tl.div_rn(high - low, levels), ROUNDING)
        broken = broken | (code > 254)
        code = tl.minimum(tl.maximum(code, 0), 254)
        step = step_of(code)
        zero = tl.minimum(nearest(tl.div_rn(0.0 - low, step)), levels)
        x = whole(x * beside(tl.div_rn(ones, step)), noise) + beside(zero)
        codes = tl.minimum(tl.maximum(x, 0.0), LEVELS).to(tl.int32)
        tl.store(scales + group, tl.where(broken, 255, code).to(tl.uint8), mask=inside)
        tl.store(zeros + group, zero.to(tl.int32).to(tl.uint8), mask=inside)
    else:
        zero = to_bf16(low)
        low = from_bf16(zero)
        step = to_bf16(tl.maximum(tl.div_rn(high - low, levels), 7.888609052210118e-31))  # 2^-100
        broken = broken | ((step & 0x7F80) == 0x7F80) | ((zero & 0x7F80) == 0x7F80)
        x = (x - beside(low)) * beside(tl.div_rn(ones, from_bf16(step)))
        codes = whole(tl.minimum(tl.maximum(x, 0.0), LEVELS), noise).to(tl.int32)
        codes = tl.where(beside(broken), 0, codes)
        tl.store(scales + group, tl.where(broken, 0x7FC0, step).to(tl.uint16), mask=inside)
        tl.store(zeros + group, tl.where(broken, 0, zero).to(tl.uint16), mask=inside)

    if BITS == 8:
        tl.store(record + column, codes.to(tl.uint8), mask=column < WIDTH)
    if BITS < 8 and BITS & 4:
        _store_plane(record, word, codes, eighth, words_inside, 4, BITS & 3)
        record += WIDTH // 2
    if BITS & 2:
        _store_plane(record, word, codes, eighth, words_inside, 2, BITS & 1)
        record += WIDTH // 4
    if BITS & 1:
        _store_plane(record, word, codes, eighth, words_inside, 1, 0)
    if tl.program_id(1) == 0:
        rest = PADDING + tl.arange(0, 16)
        tl.store(records + row * BYTES + rest, tl.zeros([16], tl.uint8), mask=rest < BYTES)


@triton.jit
def _decode_kernel(
    rows,
    records,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPIKES: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ENDS: tl.constexpr,
    INDICES: tl.constexpr,
    PADDING: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    record = records + row * BYTES
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < WIDTH // GROUP
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    words_inside = inside[:, None] & (word >= 0)
    eighth = tl.arange(0, 8)[None, None, :]
    column = tl.expand_dims(word, 2) * 8 + eighth

    if BITS == 8:
        codes = tl.load(record + column, mask=column < WIDTH, other=0).to(tl.int32)
    else:
        codes = tl.zeros([BLOCK, GROUP // 8, 8], tl.int32)
    plane = record
    if BITS < 8 and BITS & 4:
        codes += _load_plane(plane, word, eighth, words_inside, 4, BITS & 3)
        plane += WIDTH // 2
    if BITS & 2:
        codes += _load_plane(plane, word, eighth, words_inside, 2, BITS & 1)
        plane += WIDTH // 4
    if BITS & 1:
        codes += _load_plane(plane, word, eighth, words_inside, 1, 0)

    step = tl.load(numbers(record + SCALES, INTEGER) + group, mask=inside, other=0).to(tl.int32)
    zero = tl.load(numbers(record + ZEROS, INTEGER) + group, mask=inside, other=0).to(tl.int32)
    if INTEGER:
        broken = step == 255
        x = (codes - beside(zero)).to(tl.float32) * beside(step_of(step))
    else:
        broken = (step & 0x7FFF) > 0x7F80  # NaN
        x = codes.to(tl.float32) * beside(from_bf16(step)) + beside(from_bf16(zero))
    if SPIKES:
        ends = (record + ENDS).to(tl.pointer_type(tl.uint16))
        COUNT: tl.constexpr = WIDTH // GROUP
        place = tl.arange(0, GROUP // 8)[None, :, None] * 8 + eighth
        indices = numbers(record + INDICES, INTEGER)
        for end in tl.static_range(2):
            value = from_bf16(tl.load(ends + end * COUNT + group, mask=inside, other=0))
            at = tl.load(indices + end * COUNT + group, mask=inside, other=0).to(tl.int32)
            x = tl.where(place == beside(at), beside(value), x)
    out = rows + row * WIDTH + column
    if rows.dtype.element_ty == tl.bfloat16:
        bits = tl.where(beside(broken), 0x7FC0, to_bf16(x)).to(tl.uint16)
        tl.store(out.to(tl.pointer_type(tl.uint16)), bits, mask=column < WIDTH)
    else:
        tl.store(out, tl.where(beside(broken), float("nan"), x), mask=column < WIDTH)
