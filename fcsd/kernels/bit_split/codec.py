"""Rows to records and back: by kernels on GPUs, by torch elsewhere."""

import torch
from torch import Tensor

from fcsd.kernels.bit_split import reference
from fcsd.kernels.bit_split.draws import Draws
from fcsd.kernels.bit_split.format import Format


def encode(rows: Tensor, format: Format, draws: Draws | None = None) -> Tensor:
    """Rows ``[n, width]``, bf16 or fp32, as records, uint8 ``[n, row_bytes]``.

    Args:
        draws: with them a value goes up or down at random, so that it is right on average; else to the nearest code.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    if rows.is_cuda:
        from fcsd.kernels.bit_split import kernels

        return kernels.encode(rows, format, draws)
    return reference.encode(rows, format, draws)


def decode(records: Tensor, format: Format, width: int, dtype: torch.dtype) -> Tensor:
    """Records, uint8 ``[n, row_bytes]``, as rows ``[n, width]`` of ``dtype``, bf16 or fp32.

    Raises:
        ConfigError: the format's groups do not divide the row.
    """
    if records.is_cuda:
        from fcsd.kernels.bit_split import kernels

        return kernels.decode(records, format, width, dtype)
    return reference.decode(records, format, width, dtype)
