"""Records by Triton kernels, equal to ``reference`` bit for bit, compiled and in Triton's interpreter.

A program holds some groups of one row as ``[groups, group / 8, 8]``: the eight values of the last axis are one word
of each plane. The arithmetic is such that every backend gives the same bits: correctly rounded divisions, no fused
multiply-add, no logarithm, no atomics, and bf16 rounded by integers (the interpreter cuts a cast to bf16 off).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels.bit_split.format import Format

_MOST_VALUES = 2048  # that a program holds at once


def encode(rows: Tensor, format: Format) -> Tensor:
    """Rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[n, row_bytes]``.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    layout = format.layout(rows.shape[1])
    records = rows.new_empty(len(rows), layout.bytes, dtype=torch.uint8)
    _launch(_encode_kernel, rows.contiguous(), records, format, CLIP=format.clip, ROUNDING=format.rounding)
    return records


def decode(records: Tensor, format: Format, width: int, dtype: torch.dtype) -> Tensor:
    """Records, uint8 ``[n, row_bytes]``, as rows ``[n, width]`` of ``dtype``, bf16 or fp32.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    rows = records.new_empty(len(records), width, dtype=dtype)
    _launch(_decode_kernel, rows, records.contiguous(), format)
    return rows


def _launch(kernel: triton.JITFunction, rows: Tensor, records: Tensor, format: Format, **constants: object) -> None:
    """One program for at most ``_MOST_VALUES`` values of a row."""
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
def _mantissa(j):
    """``scale.MANTISSAS[j]``."""
    m = tl.where(j >= 1, 602079, 0)
    m = tl.where(j >= 2, 1247372, m)
    m = tl.where(j >= 3, 1938980, m)
    m = tl.where(j >= 4, 2680227, m)
    m = tl.where(j >= 5, 3474675, m)
    m = tl.where(j >= 6, 4326144, m)
    m = tl.where(j >= 7, 5238726, m)
    m = tl.where(j >= 8, 6216807, m)
    return tl.where(j >= 9, 7265088, m)


@triton.jit
def _code_of(step, ROUNDING: tl.constexpr):
    """``scale.code_of``."""
    if ROUNDING == "nearest":
        step = step * 1.0352649688720703
    bits = step.to(tl.int32, bitcast=True)
    if ROUNDING == "ceil":
        bits -= 1
    code = ((bits >> 23) - 127) * 10 + 128
    if ROUNDING == "ceil":
        code += 1
    mantissa = bits & 0x7FFFFF
    for j in tl.static_range(1, 10):
        code += (mantissa >= _mantissa(j)).to(tl.int32)
    return code


@triton.jit
def _step_of(code):
    """``scale.step_of``."""
    tens = code + 2
    return ((((tens // 10) + 114) << 23) | _mantissa(tens % 10)).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(x):
    """The bits of ``x``, fp32 and not NaN, in bf16: rounded to nearest, ties to even. int32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _from_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    """To the nearest whole number, ties to even: the sum with 1.5 * 2^23 has no bits for fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _least(x):
    """Of each group: ``[groups, group / 8, 8] -> [groups]``."""
    return tl.min(tl.min(x, 2), 1)


@triton.jit
def _greatest(x):
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def _spread(x):
    """One number of each group, ``[groups]``, beside its values: ``[groups, 1, 1]``."""
    return tl.expand_dims(tl.expand_dims(x, 1), 2)


@triton.jit
def _store_plane(plane, word, codes, eighth, inside, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Store ``BITS`` bits of each code, from bit ``SHIFT``; ``word`` is the number of each eight values in the row."""
    fields = ((codes >> SHIFT) & ((1 << BITS) - 1)).to(tl.uint32)
    words = tl.sum(fields << (eighth * BITS).to(tl.uint32), 2)
    if BITS == 4:
        tl.store(plane.to(tl.pointer_type(tl.uint32)) + word, words, mask=inside)
    elif BITS == 2:
        tl.store(plane.to(tl.pointer_type(tl.uint16)) + word, words.to(tl.uint16), mask=inside)
    else:
        tl.store(plane + word, words.to(tl.uint8), mask=inside)


@triton.jit
def _load_plane(plane, word, eighth, inside, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """The part of each code that ``_store_plane`` stored, in its place."""
    if BITS == 4:
        words = tl.load(plane.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)
    elif BITS == 2:
        words = tl.load(plane.to(tl.pointer_type(tl.uint16)) + word, mask=inside, other=0).to(tl.uint32)
    else:
        words = tl.load(plane + word, mask=inside, other=0).to(tl.uint32)
    fields = tl.expand_dims(words, 2) >> (eighth * BITS).to(tl.uint32)
    return (fields & ((1 << BITS) - 1)).to(tl.int32) << SHIFT


@triton.jit
def _encode_kernel(
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
    LEVELS: tl.constexpr = (1 << BITS) - 1

    column = tl.expand_dims(word, 2) * 8 + eighth
    x = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    broken = _greatest((exponent == 0x7F800000).to(tl.int32)) != 0
    x = tl.where((exponent == 0x7F800000) | (exponent == 0), 0.0, x)

    if SPIKES:
        ends = (record + ENDS).to(tl.pointer_type(tl.uint16))
        COUNT: tl.constexpr = WIDTH // GROUP
        low, high = _least(x), _greatest(x)
        low_at = _least(tl.where(x == _spread(low), place, GROUP))
        high_at = _least(tl.where(x == _spread(high), place, GROUP))
        x = tl.where((place == _spread(low_at)) | (place == _spread(high_at)), 0.0, x)
        tl.store(ends + group, _to_bf16(low).to(tl.uint16), mask=inside)
        tl.store(ends + COUNT + group, _to_bf16(high).to(tl.uint16), mask=inside)
        tl.store(record + INDICES + group, low_at.to(tl.uint8), mask=inside)
        tl.store(record + INDICES + COUNT + group, high_at.to(tl.uint8), mask=inside)

    low, high = _least(x) * CLIP, _greatest(x) * CLIP
    levels = tl.full([BLOCK], LEVELS, tl.float32)
    if INTEGER:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
        code = _code_of(tl.div_rn(high - low, levels), ROUNDING)
        broken = broken | (code > 254)
        code = tl.minimum(tl.maximum(code, 0), 254)
        step = _step_of(code)
        zero = tl.minimum(_round(tl.div_rn(0.0 - low, step)), levels)
        x = _round(tl.div_rn(x, _spread(step) + tl.zeros_like(x))) + _spread(zero)
        codes = tl.minimum(tl.maximum(x, 0.0), LEVELS).to(tl.int32)
        tl.store(record + SCALES + group, tl.where(broken, 255, code).to(tl.uint8), mask=inside)
        tl.store(record + ZEROS + group, zero.to(tl.int32).to(tl.uint8), mask=inside)
    else:
        zero = _to_bf16(low)
        low = _from_bf16(zero)
        step = _to_bf16(tl.maximum(tl.div_rn(high - low, levels), 7.888609052210118e-31))  # 2^-100
        broken = broken | ((step & 0x7F80) == 0x7F80) | ((zero & 0x7F80) == 0x7F80)
        x = tl.div_rn(x - _spread(low), _spread(_from_bf16(step)) + tl.zeros_like(x))
        codes = _round(tl.minimum(tl.maximum(x, 0.0), LEVELS)).to(tl.int32)
        codes = tl.where(_spread(broken), 0, codes)
        scales = (record + SCALES).to(tl.pointer_type(tl.uint16))
        zeros = (record + ZEROS).to(tl.pointer_type(tl.uint16))
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

    if INTEGER:
        code = tl.load(record + SCALES + group, mask=inside, other=0).to(tl.int32)
        zero = tl.load(record + ZEROS + group, mask=inside, other=0).to(tl.int32)
        broken = code == 255
        x = (codes - _spread(zero)).to(tl.float32) * _spread(_step_of(code))
    else:
        scales = (record + SCALES).to(tl.pointer_type(tl.uint16))
        zeros = (record + ZEROS).to(tl.pointer_type(tl.uint16))
        step = tl.load(scales + group, mask=inside, other=0)
        zero = tl.load(zeros + group, mask=inside, other=0)
        broken = (step & 0x7FFF) > 0x7F80  # NaN
        x = codes.to(tl.float32) * _spread(_from_bf16(step)) + _spread(_from_bf16(zero))
    if SPIKES:
        ends = (record + ENDS).to(tl.pointer_type(tl.uint16))
        COUNT: tl.constexpr = WIDTH // GROUP
        place = tl.arange(0, GROUP // 8)[None, :, None] * 8 + eighth
        for end in tl.static_range(2):
            value = _from_bf16(tl.load(ends + end * COUNT + group, mask=inside, other=0))
            at = tl.load(record + INDICES + end * COUNT + group, mask=inside, other=0).to(tl.int32)
            x = tl.where(place == _spread(at), _spread(value), x)
    out = rows + row * WIDTH + column
    if rows.dtype.element_ty == tl.bfloat16:
        bits = tl.where(_spread(broken), 0x7FC0, _to_bf16(x)).to(tl.uint16)
        tl.store(out.to(tl.pointer_type(tl.uint16)), bits, mask=column < WIDTH)
    else:
        tl.store(out, tl.where(_spread(broken), float("nan"), x), mask=column < WIDTH)
