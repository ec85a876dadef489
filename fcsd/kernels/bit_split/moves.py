"""Encodes rows where they are packed to be sent, and decodes records where they are ordered for the experts.

Each function equals two steps of which it saves the tensor between them: ``encode_at`` moves rows and encodes them, the
others decode records and move or sum the rows. On GPUs each is one Triton kernel of ``kernels``, if the format has
them. Elsewhere torch makes the two steps; these functions are the references of the kernels, which agree in every bit.
Only the sums of ``decode_dots`` are added in another order.

Places are int64. -1 stands for no record. Every function raises a ConfigError where the format's groups do not divide
the row.
"""

import torch
from torch import Tensor

from fcsd.kernels import rows_reference
from fcsd.kernels.bit_split import reference
from fcsd.kernels.bit_split.format import Format


def encode_at(rows: Tensor, format: Format, weight: Tensor | None, places: Tensor, count: int) -> Tensor:
    """Encode each row at its places: ``records[places[i, k]] = encode(weight[i, k] * rows[i])``.

    A row without weights is encoded once for all its places. The product with a weight is computed in fp32, or wider,
    and rounded to the dtype of the rows.

    Args:
        rows: bf16 or fp32 ``[n, width]``.
        weight: ``[n, most]``; None stands for ones.
        places: ``[n, most]``. Every record is named once.

    Returns: uint8 ``[count, row_bytes]``.
    """
    if rows.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        return kernels.encode(rows, format, weight=weight, places=places, count=count)
    moved = rows.new_empty(count, rows.shape[1])
    rows_reference.spread(rows, weight, places, moved)
    return reference.encode(moved, format)


def decode_from(records: Tensor, format: Format, width: int, dtype: torch.dtype, source: Tensor) -> Tensor:
    """Decode the record ``source[i]`` as row i: ``[len(source), width]`` of ``dtype``, bf16 or fp32.

    A row without a record, where ``source`` is -1, is zero.
    """
    if records.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        return kernels.decode(records, format, width, dtype, source)
    rows = torch.zeros(len(source), width, dtype=dtype, device=records.device)
    there = source >= 0
    rows[there] = reference.decode(records[source[there]], format, width, dtype)
    return rows


def decode_sum(
    records: Tensor, format: Format, width: int, dtype: torch.dtype, weight: Tensor | None, places: Tensor
) -> Tensor:
    """Decode the records of each row and sum them: row i is the sum over k of ``weight[i, k] * records[places[i, k]]``.

    Each record is decoded to ``dtype``. Products and sums are computed in fp32 in the order of k, and rounded once.

    Args:
        records: uint8 ``[records, row_bytes]``.
        dtype: bf16 or fp32.
        weight: ``[n, most]``; None stands for ones.
        places: ``[n, most]``.

    Returns: ``[n, width]`` of ``dtype``.
    """
    if records.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        return kernels.decode_sum(records, format, width, dtype, weight, places)
    sums = torch.empty(len(places), width, dtype=dtype, device=records.device)
    rows_reference.collect(reference.decode(records, format, width, dtype), weight, places, sums)
    return sums


def decode_ranks(records: Tensor, format: Format, rows: Tensor) -> None:
    """Replace rows by the sum of their records, of which each rank has one.

    Records are decoded to fp32 and added from the first rank to the last, and sums are rounded once.

    Args:
        records: uint8 ``[ranks, n, row_bytes]``, contiguous.
        rows: bf16 or fp32 ``[n, width]``, contiguous.
    """
    if records.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        kernels.decode(records.flatten(0, 1), format, rows.shape[1], rows.dtype, out=rows, ranks=len(records))
    else:
        rows.copy_(_added(records, format, rows.shape[1]))


def encode_sum(records: Tensor, format: Format, width: int, sums: Tensor) -> None:
    """Encode the sums that ``decode_ranks`` computes, before they are rounded.

    Args:
        records: uint8 ``[ranks, n, row_bytes]``, contiguous.
        sums: where the result is written: uint8 ``[n, row_bytes]``, contiguous.
    """
    if records.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        kernels.encode_sum(records, format, width, sums)
    else:
        sums.copy_(reference.encode(_added(records, format, width), format))


def _added(records: Tensor, format: Format, width: int) -> Tensor:
    """The sums of records ``[ranks, n, row_bytes]`` over ranks, fp32 ``[n, width]``."""
    total = reference.decode(records[0], format, width, torch.float32)
    for one in records[1:]:
        total += reference.decode(one, format, width, torch.float32)
    return total


def decode_dots(records: Tensor, format: Format, rows: Tensor, places: Tensor) -> Tensor:
    """The scalar product of each row with each of its decoded records, fp32 ``[n, most]``; 0 where there is none.

    Each record is decoded to the dtype of the rows.

    Args:
        records: uint8 ``[records, row_bytes]``.
        rows: bf16 or fp32 ``[n, width]``.
        places: ``[n, most]``.
    """
    if records.is_cuda and format.has_kernels:
        from fcsd.kernels.bit_split import kernels

        return kernels.decode_dots(records, format, rows, places)
    return rows_reference.dots(rows, reference.decode(records, format, rows.shape[1], rows.dtype), places)
