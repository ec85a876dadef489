"""Functions of the Triton kernels in ``kernels``: the values of a program become codes, scales and zeros, and back.

A program holds some groups of one row as ``[PARTS, groups, LANES, 8]``. The eight values of the last axis are one word
of each plane. ``LANES`` neighbouring threads and ``PARTS`` words in each of them share a group: value ``v`` of a group
is at ``[v // 8 // LANES, group, v // 8 % LANES, v % 8]``. With several words of a group in one thread, fewer threads
repeat the arithmetic of the group's scale.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuples ROW and MEMORY, which pyright does not know of.

from typing import NamedTuple

import triton
import triton.language as tl

from fcsd.kernels.bit_split.arithmetic import (
    beside,
    code_of,
    flushed,
    from_bf16,
    greatest,
    greatest_or_nan,
    greatest_or_nan_in_thread,
    greatest_or_nan_of_lanes,
    least,
    least_in_thread,
    nearest,
    not_finite,
    numbers,
    step_of,
    to_bf16,
)


class Row(NamedTuple):
    """The format of a row's record, and how a program holds its values: what is known when a kernel is compiled.

    Attributes:
        width: the number of values of the row.
        bits, group, clip, rounding: see ``format.Format``.
        spikes: whether spikes are reserved.
        integer: whether scales, zeros and indices are whole numbers of one byte.
        scales, zeros, ends, indices, padding: where these parts of the record begin, in bytes.
        bytes: the size of the record.
        parts: how many words of a group one thread holds.
        block: how many groups a program holds.
    """

    width: int
    bits: int
    group: int
    spikes: bool
    integer: bool
    scales: int
    zeros: int
    ends: int
    indices: int
    padding: int
    bytes: int
    clip: float
    rounding: str
    parts: int
    block: int


@triton.jit
def words_of(group, ROW: tl.constexpr):
    """The number of each word in its row, ``[ROW.parts, groups, LANES]``, for the groups with the numbers ``group``."""
    LANES: tl.constexpr = ROW.group // (8 * ROW.parts)  # pyright: ignore[reportOperatorIssue]
    part, lane = tl.arange(0, ROW.parts)[:, None, None], tl.arange(0, LANES)[None, None, :]
    return group[None, :, None] * (ROW.group // 8) + part * LANES + lane


@triton.jit
def eighths():
    """The place of each value in its word, ``[1, 1, 1, 8]``."""
    return tl.arange(0, 8)[None, None, None, :]


@triton.jit
def in_thread(ROW: tl.constexpr):
    """What a value's place in its group has in the first lane, ``[ROW.parts, 1, 1, 8]``; ``of_lane`` is the rest."""
    LANES: tl.constexpr = ROW.group // (8 * ROW.parts)  # pyright: ignore[reportOperatorIssue]
    return tl.arange(0, ROW.parts)[:, None, None, None] * (8 * LANES) + eighths()


@triton.jit
def of_lane(ROW: tl.constexpr):
    """The place of each lane's first value in its group, ``[1, LANES]``."""
    LANES: tl.constexpr = ROW.group // (8 * ROW.parts)  # pyright: ignore[reportOperatorIssue]
    return tl.arange(0, LANES)[None, :] * 8


@triton.jit
def is_at(at, ROW: tl.constexpr):
    """Which values have the place ``at [groups]`` in their group, compared with a constant in each thread."""
    return in_thread(ROW) == tl.expand_dims(tl.expand_dims(at[:, None] - of_lane(ROW), 0), 3)


@triton.jit
def zeros(ROW: tl.constexpr):
    """Zeros in the shape of a program's values, fp32."""
    PARTS: tl.constexpr = ROW.parts
    BLOCK: tl.constexpr = ROW.block
    LANES: tl.constexpr = ROW.group // (8 * ROW.parts)
    return tl.zeros([PARTS, BLOCK, LANES, 8], tl.float32)


@triton.jit
def encode_values(x, ROW: tl.constexpr, EXACT: tl.constexpr):
    """Encode values ``x``, fp32.

    Args:
        EXACT: whether the values come from bf16, so that the zero of a group is exactly its least value.

    Returns: codes + 0x4B400000, int32 in the shape of ``x``; and for each group -1, or 0 if it has no codes, its scale,
        its zero, its spikes in bf16, and their places. Without spikes the last four mean nothing.
    """
    LEVELS: tl.constexpr = (1 << ROW.bits) - 1  # pyright: ignore[reportOperatorIssue]
    least_bits, greatest_bits, least_at, greatest_at = 0, 0, 0, 0
    if not ROW.spikes:
        low, high = least(x), greatest_or_nan(x)
        broken = not_finite(low) | not_finite(high)
        low, high = tl.where(broken, 0.0, flushed(low)), tl.where(broken, 0.0, flushed(high))
    else:
        if not EXACT:
            x = from_bf16(to_bf16(x))
        marked = (x.to(tl.int32, bitcast=True) | in_thread(ROW)).to(tl.float32, bitcast=True)
        least_bits = least_in_thread(marked).to(tl.int32, bitcast=True) | of_lane(ROW)
        greatest_bits = greatest_or_nan_in_thread(marked).to(tl.int32, bitcast=True) | of_lane(ROW)
        least_bits = tl.min(least_bits.to(tl.float32, bitcast=True), 1).to(tl.int32, bitcast=True)
        greatest_bits = greatest_or_nan_of_lanes(greatest_bits.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        least_at, greatest_at = least_bits & 0xFF, greatest_bits & 0xFF
        low, high = flushed(from_bf16(least_bits >> 16)), flushed(from_bf16(greatest_bits >> 16))
        broken = not_finite(low) | not_finite(high)
        x = tl.where(is_at(least_at, ROW) | is_at(greatest_at, ROW), 0.0, x)
        least_at, greatest_at = tl.where(broken, 0, least_at), tl.where(broken, 0, greatest_at)
        least_bits, greatest_bits = to_bf16(tl.where(broken, 0.0, low)), to_bf16(tl.where(broken, 0.0, high))
        low, high = flushed(least(x)) * ROW.clip, flushed(greatest(x)) * ROW.clip

    # An fp32 number from 1.5 * 2^23 on has no fraction bits, and its lowest bits are the whole number that was added.
    ones = tl.full(low.shape, 1.0, tl.float32)
    ROUNDING: tl.constexpr = ROW.rounding
    if ROW.integer:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
        scale = code_of((high - low) * (1.0 / LEVELS), ROUNDING)
        broken = broken | (scale > 254)
        scale = tl.minimum(tl.maximum(scale, 0), 254)
        inverse = tl.div_rn(ones, step_of(scale))
        zero = tl.minimum(nearest((0.0 - low) * inverse), LEVELS)
        x = x * beside(inverse)
        x = tl.minimum(tl.maximum((x + 12582912.0) + beside(zero), 12582912.0), 12582912.0 + LEVELS)
        scale, zero = tl.where(broken, 255, scale), tl.where(broken, 0.0, zero).to(tl.int32)
    else:
        zero = to_bf16(low)
        low = from_bf16(zero)
        scale = to_bf16(tl.maximum((high - low) * (1.0 / LEVELS), 7.888609052210118e-31))  # 2^-100
        broken = broken | ((scale & 0x7F80) == 0x7F80) | ((zero & 0x7F80) == 0x7F80)
        x = (x - beside(low)) * beside(tl.div_rn(ones, from_bf16(scale)))
        if not EXACT or ROW.spikes:
            x = tl.maximum(x, 0.0)
        x = tl.minimum(x, LEVELS)
        x += 12582912.0
        scale, zero = tl.where(broken, 0x7FC0, scale.to(tl.int32)), tl.where(broken, 0, zero.to(tl.int32))
    codes = x.to(tl.int32, bitcast=True)
    return codes, tl.where(broken, 0, -1), scale, zero, least_bits, greatest_bits, least_at, greatest_at


@triton.jit
def _store_plane(plane, word, codes, keep, inside, BITS: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr):
    """Store ``BITS`` bits of each code, from bit ``SHIFT`` on; ``word`` numbers the blocks of eight values in a row.

    The bits above those of a code need no mask for each value in its highest plane: in four bits their sum is known,
    and in two they lie above the word.
    """
    MASK: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportOperatorIssue]
    fields = codes >> SHIFT
    if not TOP:
        fields = fields & MASK
    words = tl.sum(fields.to(tl.uint32) << (eighths() * BITS).to(tl.uint32), 3)
    if BITS == 4:
        ABOVE: tl.constexpr = (0x4B400000 >> SHIFT) * 0x11111111 & 0xFFFFFFFF  # pyright: ignore[reportOperatorIssue]
        words -= ABOVE
    words = words & keep[None, :, None].to(tl.uint32)
    if BITS == 4:
        tl.store(plane.to(tl.pointer_type(tl.uint32)) + word, words, mask=inside)
    elif BITS == 2:
        tl.store(plane.to(tl.pointer_type(tl.uint16)) + word, words.to(tl.uint16), mask=inside)
    else:
        tl.store(plane + word, words.to(tl.uint8), mask=inside)


@triton.jit
def _load_plane(plane, word, inside, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Load the bits of each code that ``_store_plane`` stored, shifted to their place in the code."""
    if BITS == 4:
        words = tl.load(plane.to(tl.pointer_type(tl.uint32)) + word, mask=inside, other=0)
    elif BITS == 2:
        words = tl.load(plane.to(tl.pointer_type(tl.uint16)) + word, mask=inside, other=0).to(tl.uint32)
    else:
        words = tl.load(plane + word, mask=inside, other=0).to(tl.uint32)
    fields = tl.expand_dims(words, 3) >> (eighths() * BITS).to(tl.uint32)
    MASK: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportOperatorIssue]
    return (fields & MASK).to(tl.int32) << SHIFT


@triton.jit
def store_record(record, coded, word, group, inside, ROW: tl.constexpr):
    """Store what ``encode_values`` returns in the record that begins at ``record``.

    Args:
        coded: the result of ``encode_values``.
        word: the numbers of the words, ``[ROW.parts, groups, LANES]``.
        group: the numbers of the groups.
        inside: which of the groups the row has.
    """
    codes, keep, scale, zero, least_bits, greatest_bits, least_at, greatest_at = coded
    COUNT: tl.constexpr = ROW.width // ROW.group  # pyright: ignore[reportOperatorIssue]
    scales, zeros = numbers(record + ROW.scales, ROW.integer), numbers(record + ROW.zeros, ROW.integer)
    tl.store(scales + group, scale.to(scales.dtype.element_ty), mask=inside)
    tl.store(zeros + group, zero.to(zeros.dtype.element_ty), mask=inside)
    if ROW.spikes:
        ends, indices = numbers(record + ROW.ends, False), numbers(record + ROW.indices, ROW.integer)
        tl.store(ends + group, least_bits.to(tl.uint16), mask=inside)
        tl.store(ends + COUNT + group, greatest_bits.to(tl.uint16), mask=inside)
        tl.store(indices + group, least_at.to(indices.dtype.element_ty), mask=inside)
        tl.store(indices + COUNT + group, greatest_at.to(indices.dtype.element_ty), mask=inside)
    words_inside = inside[None, :, None] & (word >= 0)
    plane = record
    if ROW.bits == 8:
        column = tl.expand_dims(word, 3) * 8 + eighths()
        tl.store(
            plane + column, (codes & beside(keep)).to(tl.uint8), mask=tl.expand_dims(words_inside, 3) & (column >= 0)
        )
    if ROW.bits < 8 and ROW.bits & 4:
        _store_plane(plane, word, codes, keep, words_inside, 4, ROW.bits & 3, True)
        plane += ROW.width // 2
    if ROW.bits & 2:
        _store_plane(plane, word, codes, keep, words_inside, 2, ROW.bits & 1, ROW.bits < 4)
        plane += ROW.width // 4
    if ROW.bits & 1:
        _store_plane(plane, word, codes, keep, words_inside, 1, 0, False)


@triton.jit
def load_values(record, word, group, inside, ROW: tl.constexpr):
    """Decode the groups ``group`` of a record: values, fp32, NaN in broken groups, 0 where not ``inside``."""
    COUNT: tl.constexpr = ROW.width // ROW.group  # pyright: ignore[reportOperatorIssue]
    words_inside = inside[None, :, None] & (word >= 0)
    step = tl.load(numbers(record + ROW.scales, ROW.integer) + group, mask=inside, other=0).to(tl.int32)
    zero = tl.load(numbers(record + ROW.zeros, ROW.integer) + group, mask=inside, other=0).to(tl.int32)
    plane = record
    if ROW.bits == 8:
        column = tl.expand_dims(word, 3) * 8 + eighths()
        every = tl.expand_dims(words_inside, 3) & (column >= 0)
        codes = tl.load(plane + column, mask=every, other=0).to(tl.int32)
    else:
        codes = tl.zeros([1, 1, 1, 8], tl.int32)
    if ROW.bits < 8 and ROW.bits & 4:
        codes = codes | _load_plane(plane, word, words_inside, 4, ROW.bits & 3)
        plane += ROW.width // 2
    if ROW.bits & 2:
        codes = codes | _load_plane(plane, word, words_inside, 2, ROW.bits & 1)
        plane += ROW.width // 4
    if ROW.bits & 1:
        codes = codes | _load_plane(plane, word, words_inside, 1, 0)

    x = (codes | 0x4B000000).to(tl.float32, bitcast=True)  # the code + 2^23, without a conversion
    if ROW.integer:
        broken = step == 255
        scale = tl.where(broken, float("nan"), step_of(step))
        x = (x - beside(8388608.0 + zero.to(tl.float32))) * beside(scale)
    else:
        scale = from_bf16(step)
        broken = scale != scale
        x = (x - 8388608.0) * beside(scale) + beside(from_bf16(zero))
    if ROW.spikes:
        ends, indices = numbers(record + ROW.ends, False), numbers(record + ROW.indices, ROW.integer)
        for end in tl.static_range(2):
            value = from_bf16(tl.load(ends + end * COUNT + group, mask=inside, other=0))
            at = tl.load(indices + end * COUNT + group, mask=inside, other=0).to(tl.int32)
            x = tl.where(is_at(at, ROW), beside(tl.where(broken, scale, value)), x)
    return x
