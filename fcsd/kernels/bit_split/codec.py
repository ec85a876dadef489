"""Encodes rows as records and decodes them: by Triton kernels on GPUs, by torch on other devices and without kernels.

A format whose groups do not divide the row is a ConfigError. Torch is imported when rows are encoded, so that the name
of a format is checked without it.
"""

from typing import TYPE_CHECKING

from fcsd.kernels.bit_split.format import Format

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def encode(rows: "Tensor", format: Format, out: "Tensor | None" = None) -> "Tensor":
    """Encode rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[n, row_bytes]``.

    Args:
        out: contiguous records to write to and return; None makes new ones.
    """
    if rows.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        return kernels.encode(rows, format, out=out)
    from fcsd.kernels.bit_split import reference

    records = reference.encode(rows, format)
    return records if out is None else out.copy_(records)


def decode(
    records: "Tensor", format: Format, width: int, dtype: "torch.dtype", out: "Tensor | None" = None
) -> "Tensor":
    """Decode records, uint8 ``[n, row_bytes]``, to rows ``[n, width]`` of ``dtype``, bf16 or fp32.

    Args:
        out: contiguous rows to write to and return; None makes new ones.
    """
    if records.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        return kernels.decode(records, format, width, dtype, out=out)
    from fcsd.kernels.bit_split import reference

    rows = reference.decode(records, format, width, dtype)
    return rows if out is None else out.copy_(rows)
