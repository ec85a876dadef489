"""Functions of the Triton kernels in ``kernels``: scale bytes, bf16 as integers, rounding, reductions over groups.

Every backend computes the same bits, because nothing here depends on how a device or the interpreter fuses or
approximates, and ``to_bf16`` rounds alike in both.
"""

import triton
import triton.language as tl
from triton import knobs

# Triton's interpreter drops the lowest bits of a number that it casts to bf16. A GPU rounds it, in one instruction.
_COMPILED = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def _mantissa(j, UNIT: tl.constexpr):
    """``scale.MANTISSAS[j // UNIT]``."""
    m = tl.where(j >= 1 * UNIT, 602079, 0)
    m = tl.where(j >= 2 * UNIT, 1247372, m)
    m = tl.where(j >= 3 * UNIT, 1938980, m)
    m = tl.where(j >= 4 * UNIT, 2680227, m)
    m = tl.where(j >= 5 * UNIT, 3474675, m)
    m = tl.where(j >= 6 * UNIT, 4326144, m)
    m = tl.where(j >= 7 * UNIT, 5238726, m)
    m = tl.where(j >= 8 * UNIT, 6216807, m)
    return tl.where(j >= 9 * UNIT, 7265088, m)


@triton.jit
def code_of(step, ROUNDING: tl.constexpr):
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
    for j in tl.static_range(1, 10):  # pyright: ignore[reportGeneralTypeIssues]
        code += (mantissa >= _mantissa(j, 1)).to(tl.int32)
    return code


@triton.jit
def step_of(code):
    """``scale.step_of``."""
    # The upper 16 bits of the product are (code + 2) // 10, the lower ones 6554 * ((code + 2) % 10) plus at most 100.
    # With // and % the compiler adds in packed 16 bits, which ptxas 12.8 gets wrong.
    tenths = (code + 2) * 6554
    return ((((tenths >> 16) + 114) << 23) | _mantissa(tenths & 0xFFFF, 6554)).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x):
    """The bits of ``x``, fp32, in bf16: rounded to nearest, ties to even. uint16. NaN stays NaN, with any payload."""
    if _COMPILED:
        return x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def from_bf16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x):
    """``x`` rounded to the nearest whole number, ties to even: an fp32 number near 1.5 * 2^23 has no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def least_in_thread(x):
    """The least value of each group in each lane: ``[parts, groups, lanes, 8] -> [groups, lanes]``."""
    return tl.min(tl.min(x, 3), 0)


@triton.jit
def least(x):
    """The least value of each group: ``[parts, groups, lanes, 8] -> [groups]``."""
    return tl.min(least_in_thread(x), 1)


@triton.jit
def greatest(x):
    return tl.max(tl.max(tl.max(x, 3), 0), 1)


@triton.jit
def _greater_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest_or_nan_in_thread(x):
    """The greatest value of each group in each lane, or NaN if any value is NaN."""
    return tl.reduce(tl.reduce(x, 3, _greater_or_nan), 0, _greater_or_nan)


@triton.jit
def greatest_or_nan_of_lanes(x):
    return tl.reduce(x, 1, _greater_or_nan)


@triton.jit
def greatest_or_nan(x):
    """The greatest value of each group, or NaN if any value is NaN."""
    return greatest_or_nan_of_lanes(greatest_or_nan_in_thread(x))


@triton.jit
def beside(x):
    """One number for each group, ``[groups]``, in a shape that broadcasts over its values: ``[1, groups, 1, 1]``."""
    return tl.expand_dims(tl.expand_dims(tl.expand_dims(x, 0), 2), 3)


@triton.jit
def flushed(x):
    """``x``, in which subnormal numbers and -0 have become 0."""
    return tl.where(tl.abs(x) < 1.1754943508222875e-38, 0.0, x)


@triton.jit
def not_finite(x):
    return (tl.abs(x) < float("inf")) == 0  # NaN is not less than infinity


@triton.jit
def numbers(start, INTEGER: tl.constexpr):
    """A pointer to scales, zeros or indices. They have one byte each with integer scales, and two bytes otherwise."""
    if INTEGER:
        return start
    else:
        return start.to(tl.pointer_type(tl.uint16))
