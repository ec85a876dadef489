"""Encodes and decodes records by torch, on any device: the reference that the kernels equal bit for bit."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fcsd.kernels.bit_split import scale
from fcsd.kernels.bit_split.format import Format

_LEAST_STEP = 2.0**-100  # the step of a constant group; large enough that values divided by it stay finite


def encode(rows: Tensor, format: Format) -> Tensor:
    """Encode rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[n, row_bytes]``.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    size = format.row_bytes(rows.shape[1])
    x = (rows.bfloat16() if format.spikes else rows).float()
    x = x.contiguous().view(len(rows), rows.shape[1] // format.group, format.group)
    broken = ~x.isfinite().all(2)  # [n, groups]
    x = x.masked_fill(~x.isfinite(), 0.0)
    parts = []
    if format.spikes:
        ends, places = _spikes(x)
        x = x.scatter(2, places, 0.0)
        ends, places = (part.masked_fill(broken.unsqueeze(2), 0) for part in (_flushed(ends).bfloat16(), places))
        index = torch.uint8 if format.meta_bytes == 1 else torch.int16
        parts = [_bytes(ends.transpose(1, 2)), _bytes(places.transpose(1, 2).to(index))]
    x = _flushed(x)
    low, high = x.amin(2) * format.clip, x.amax(2) * format.clip
    codes, scales, zeros = CODINGS[format.meta].encode(x, low, high, broken, format)
    planes = split(codes.flatten(1), format)
    record = torch.cat([*planes, _bytes(scales), _bytes(zeros), *parts], dim=1)
    return F.pad(record, (0, size - record.shape[1]))


def decode(records: Tensor, format: Format, width: int, dtype: torch.dtype) -> Tensor:
    """Decode records, uint8 ``[n, row_bytes]``, to rows ``[n, width]`` of ``dtype``.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    layout, groups = format.layout(width), width // format.group
    codes = join(records, format, width).view(len(records), groups, format.group)
    scales, zeros = records[:, layout.scales : layout.zeros], records[:, layout.zeros : layout.spikes]
    x, broken = CODINGS[format.meta].decode(codes, scales, zeros)
    if format.spikes:
        ends = records[:, layout.spikes : layout.indices].contiguous().view(torch.bfloat16).float()
        places = records[:, layout.indices : layout.end].contiguous()
        places = (places if format.meta_bytes == 1 else places.view(torch.int16)).long()
        for ends_of_one, places_of_one in zip(ends.chunk(2, 1), places.chunk(2, 1), strict=True):
            x = x.scatter(2, places_of_one.unsqueeze(2), ends_of_one.unsqueeze(2))
    return x.to(dtype).masked_fill(broken.unsqueeze(2), float("nan")).view(len(records), width)


def split(codes: Tensor, format: Format) -> list[Tensor]:
    """Split codes ``[n, width]``, int32, into planes, uint8 ``[n, width * plane bits / 8]``, highest bits first."""
    planes, left = [], format.bits
    for bits in format.planes:
        left -= bits
        fields = ((codes >> left) & (2**bits - 1)).view(len(codes), codes.shape[1] * bits // 8, 8 // bits)
        shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
        planes.append((fields << shifts).sum(2).to(torch.uint8))
    return planes


def join(records: Tensor, format: Format, width: int) -> Tensor:
    """The codes, int32 ``[n, width]``, joined from the planes at the start of the records."""
    codes = records.new_zeros(len(records), width, dtype=torch.int32)
    left, start = format.bits, 0
    for bits in format.planes:
        left -= bits
        plane = records[:, start : start + width * bits // 8].int().unsqueeze(2)
        shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=records.device)
        codes += ((plane >> shifts) & (2**bits - 1)).view(len(records), width) << left
        start += width * bits // 8
    return codes


def _flushed(x: Tensor) -> Tensor:
    """``x``, in which subnormal numbers and -0 have become 0."""
    return x.masked_fill(x.abs() < torch.finfo(torch.float32).tiny, 0.0)


def _spikes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each group, and their places: two tensors ``[n, groups, 2]``.

    A place lies in the 16 bits that the values, which bf16 can hold, leave free. It decides between equal values.
    """
    marked = (x.view(torch.int32) | torch.arange(x.shape[2], dtype=torch.int32, device=x.device)).view(torch.float32)
    bits = torch.stack([marked.amin(2), marked.amax(2)], dim=2).view(torch.int32)
    return (bits & ~0xFFFF).view(torch.float32), (bits & 0xFF).long()


def _encode_integer(
    x: Tensor, low: Tensor, high: Tensor, broken: Tensor, format: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, int32 ``[n, groups, group]``, scales and zeros, uint8 ``[n, groups]``; a code stands for exactly 0."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    code = scale.code_of((high - low) * (1 / format.levels), format.rounding)
    broken = broken | (code > scale.GREATEST)
    code = code.clamp(0, scale.GREATEST)
    inverse = scale.step_of(code).reciprocal()
    zero = ((0 - low) * inverse).round().clamp(max=format.levels)
    codes = ((x * inverse.unsqueeze(2)).round() + zero.unsqueeze(2)).clamp(0, format.levels)
    codes, zero = codes.masked_fill(broken.unsqueeze(2), 0), zero.masked_fill(broken, 0)
    return codes.int(), code.masked_fill(broken, scale.BROKEN).to(torch.uint8), zero.to(torch.uint8)


def _decode_integer(codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """See ``Coding.decode``."""
    x = (codes - zeros.int().unsqueeze(2)).float() * scale.step_of(scales).unsqueeze(2)
    return x, scales == scale.BROKEN


def _encode_bf16(x: Tensor, low: Tensor, high: Tensor, broken: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, int32 ``[n, groups, group]``, scales and zeros, bf16 ``[n, groups]``; code 0 is the least value."""
    zero = low.to(torch.bfloat16)
    step = ((high - zero.float()) * (1 / format.levels)).clamp(min=_LEAST_STEP).to(torch.bfloat16)
    broken = broken | ~step.isfinite() | ~zero.isfinite()
    codes = (x - zero.float().unsqueeze(2)) * step.float().reciprocal().unsqueeze(2)
    codes = codes.clamp(0, format.levels).round()
    codes = codes.masked_fill(broken.unsqueeze(2), 0)
    return codes.int(), step.masked_fill(broken, float("nan")), zero.masked_fill(broken, 0)


def _decode_bf16(codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """See ``Coding.decode``."""
    step, zero = (part.contiguous().view(torch.bfloat16).float() for part in (scales, zeros))
    return codes.float() * step.unsqueeze(2) + zero.unsqueeze(2), step.isnan()


class Coding(NamedTuple):
    """How codes, scales and zeros are computed.

    Attributes:
        encode: of values ``[n, groups, group]``, fp32, the least and the greatest value of each group, fp32
            ``[n, groups]``, the groups that have no codes, bool ``[n, groups]``, and the format: codes, int32
            ``[n, groups, group]``, scales and zeros, ``[n, groups]`` of ``Scales.bytes``. A group without codes has
            zeros, and a scale by which ``decode`` knows it.
        decode: of codes, and of scales and zeros as bytes, uint8 ``[n, groups * Scales.bytes]``: values, fp32
            ``[n, groups, group]``, and the groups that have none.
    """

    encode: Callable[[Tensor, Tensor, Tensor, Tensor, Format], tuple[Tensor, Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


# For each way to store scales, of ``format.SCALES``.
CODINGS = {
    "bf16": Coding(_encode_bf16, _decode_bf16),
    "int": Coding(_encode_integer, _decode_integer),
}


def _bytes(values: Tensor) -> Tensor:
    """The bytes of each row of ``values [n, ...]``: uint8 ``[n, bytes]``."""
    return values.contiguous().flatten(1).view(torch.uint8)
