"""Codecs that also move rows: one kernel packs and encodes, and one decodes and orders for the experts.

Without them, a kernel packs the rows of the tokens by destination and another one encodes them; where they arrive, one
decodes them and one orders them for the experts. These codecs do each pair of steps in one kernel
(``fcsd.kernels.bit_split.moves``), on the way to the experts, on the way back, and for the gradients of both:

    dispatch, and the gradient of combine    ``ToExperts``: tokens -> records -> rows in the order of the experts
    combine, and the gradient of dispatch    ``FromExperts``: rows of experts -> records -> sums of tokens

Rows are rounded to the nearest code. A direction without a format sends its rows as they are.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.kernels import rows_reference
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.moves import decode_dots, decode_from, decode_sum, encode_at
from fcsd.parallel.expert.block import ExpertOrder


class RowPlaces:
    """Where the rows of one pass through a layer go.

    Args:
        row_of: ``[tokens, top_k]``, the number of each row among those that this rank sends.
    """

    # Returns the order of the rows that arrive for this rank's experts; set when the ranks have exchanged their counts.
    find_order: Callable[[], ExpertOrder]

    def __init__(self, row_of: Tensor) -> None:
        self.row_of = row_of

    @cached_property
    def order(self) -> ExpertOrder:
        """The order of the rows that arrive. It is found when they are first needed, after dispatch has started."""
        return self.find_order()


class ToExperts:
    """A ``Codec`` from the rows of tokens ``[tokens, width]`` to rows in the order of the experts.

    Args:
        places: where the rows go.
        format: the format of the records; None sends the rows as they are.
        weight: ``[tokens, top_k]``, factors of the rows, or None.
    """

    def __init__(self, places: RowPlaces, format: Format | None, weight: Tensor | None = None) -> None:
        self._places, self._format, self._weight = places, format, weight

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``; one record for each row to send."""
        row_of = self._places.row_of
        if self._format is not None:
            return encode_at(rows, self._format, self._weight, row_of, row_of.numel())
        moved = rows.new_empty(row_of.numel(), rows.shape[1])
        _moves_of(rows).spread(rows, self._weight, row_of, moved)
        return moved

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See ``Codec``; one row for each entry of ``ExpertOrder.source``, zero where there is none."""
        source = self._places.order.source
        if self._format is not None:
            return decode_from(records, self._format, width, dtype, source)
        ordered = records.new_empty(len(source), width)
        _moves_of(records).collect(records, None, source.unsqueeze(1), ordered)
        return ordered


class FromExperts:
    """A ``Codec`` from rows in the order of the experts to the sum of each token's rows ``[tokens, width]``.

    Args:
        places: where the rows go.
        format: the format of the records; None sends the rows as they are.
        weight: ``[tokens, top_k]``, factors of the rows in the sums, or None.
    """

    records: Tensor | None = None  # those that ``decode`` was given, until ``taken`` is called

    def __init__(self, places: RowPlaces, format: Format | None, weight: Tensor | None = None) -> None:
        self._places, self._format, self._weight = places, format, weight

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``; one record for each row that has arrived for the experts."""
        source, count = self._places.order.source, self._places.order.received
        if self._format is not None:
            return encode_at(rows, self._format, None, source.unsqueeze(1), count)
        moved = rows.new_empty(count, rows.shape[1])
        _moves_of(rows).spread(rows, None, source.unsqueeze(1), moved)
        return moved

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See ``Codec``; one row for each token."""
        row_of = self._places.row_of
        if self._weight is not None:
            self.records = records
        if self._format is not None:
            return decode_sum(records, self._format, width, dtype, self._weight, row_of)
        sums = records.new_empty(len(row_of), width)
        _moves_of(records).collect(records, self._weight, row_of, sums)
        return sums

    def with_gradient_of(self, weight: Tensor, sums: Tensor) -> Tensor:
        """``sums``, which ``decode`` has returned with the values of ``weight``, with the gradient of ``weight``."""
        records, self.records = self.records, None
        assert records is not None, "the sums have not arrived"
        return _WeightGradient.apply(sums, weight, records, self._places.row_of, self._format)  # type: ignore[return-value]


class _WeightGradient(torch.autograd.Function):
    """The identity for weighted sums; its backward pass computes the gradient of the weights from the records."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, weight: Tensor, records: Tensor, places: Tensor, format: Format | None
    ) -> Tensor:
        ctx.save_for_backward(records, places)
        ctx.format, ctx.dtype = format, weight.dtype
        return sums.view_as(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        records, places = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.format is None:
            dots = _moves_of(records).dots(grad, records, places)
        else:
            dots = decode_dots(records, ctx.format, grad, places)
        return grad, dots.to(ctx.dtype), None, None, None


def _moves_of(rows: Tensor) -> Any:
    """The kernels that move rows, on GPUs, and their reference elsewhere."""
    if not rows.is_cuda:
        return rows_reference
    from fcsd.kernels import rows as kernels  # loads Triton

    return kernels
