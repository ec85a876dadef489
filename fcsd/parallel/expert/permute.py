"""The order of rows in one pass through a layer: from tokens to rows by destination, to the experts' order, and back.

``Permute`` is the order, and ``Codec`` (``deferred.py``) is what turns a row into a record of bytes; an exchange needs
no order, and a permutation no format. ``RowPermute`` is the order alone.

``FusedPermute`` is both at once. Without it, a kernel packs the rows of the tokens by destination and another one
encodes them; where they arrive, one decodes them and one orders them for the experts. Its codecs do each pair of steps
in one kernel (``fcsd.kernels.bit_split.moves``), on the way to the experts, on the way back, and for the gradients of
both:

    dispatch, and the gradient of combine    ``ToExperts``: tokens -> records -> rows in the order of the experts
    combine, and the gradient of dispatch    ``FromExperts``: rows of experts -> records -> sums of tokens

A direction without a format sends its rows as they are.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.kernels import rows_reference
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.moves import decode_dots, decode_from, decode_sum, encode_at
from fcsd.parallel.deferred import Deferred
from fcsd.parallel.expert.block import ExpertBlock, ExpertOrder
from fcsd.parallel.quantised import Codecs, Formats


def stable_order(numbers: Tensor, count: int) -> Tensor:
    """The permutation that sorts ``numbers`` in ascending order; equal numbers keep their order.

    On a GPU a radix sort passes over all keys once for each byte of a key, and the host launches each pass. Numbers of
    experts are small, so the keys have as few bytes as hold them, usually one.

    Args:
        numbers: integers from 0 to ``count - 1``, ``[n]``.

    Returns: int64 ``[n]``.
    """
    dtype = torch.uint8 if count <= 2**8 else torch.int16 if count <= 2**15 else torch.int64
    return torch.argsort(numbers.to(dtype), stable=True)


class Permute(Protocol):
    """The order of the rows of one layer in one pass."""

    def pack(self, tokens: Tensor) -> Tensor:
        """``[tokens, hidden]`` -> what dispatch sends: a row for each token and expert, by destination.

        If the codecs pack the rows, what dispatch sends are the tokens.
        """
        ...

    def run(self, block: ExpertBlock, arriving: Deferred, counts: Tensor) -> Tensor:
        """Await what dispatch delivers, and run a block's experts on it: ``[rows, hidden]``, what combine sends.

        No name refers to the rows while the experts run, so that their memory is free.

        Args:
            counts: ``[ranks, slots]``, how many rows come from each rank for each expert of this rank.
        """
        ...

    def unpack(self, rows: Tensor) -> Tensor:
        """What combine delivered -> the weighted sum of each token's rows, ``[tokens, hidden]``."""
        ...


class RowPermute:
    """A ``Permute`` that moves rows before dispatch and after combine. The block itself orders rows for its experts.

    Args:
        pairs: ``[tokens * top_k]``, the (token, k) pair ``token * top_k + k`` of each row to send.
        scores: ``[tokens, top_k]``, the factors of the rows.
        prescaled: whether the factors multiply the rows before the experts, or their outputs after them.
        fused: whether the kernels of ``fcsd.kernels.rows`` move rows, instead of torch.
    """

    def __init__(self, pairs: Tensor, scores: Tensor, prescaled: bool, fused: bool) -> None:
        self._before, self._after = (scores, None) if prescaled else (None, scores)
        top_k = scores.shape[1]
        if fused:
            from fcsd.kernels import rows  # loads Triton

            row_of = rows.row_numbers(pairs, top_k)
            self._permute = partial(rows.permute, row_of=row_of)
            self._unpermute = partial(rows.unpermute, row_of=row_of)
        else:
            self._permute = partial(rows_reference.permute, order=pairs, top_k=top_k)
            self._unpermute = partial(rows_reference.unpermute, order=pairs, top_k=top_k)

    def pack(self, tokens: Tensor) -> Tensor:
        return self._permute(tokens, self._before)

    def run(self, block: ExpertBlock, arriving: Deferred, counts: Tensor) -> Tensor:
        return block.run(arriving.wait(), counts)

    def unpack(self, rows: Tensor) -> Tensor:
        return self._unpermute(rows, self._after)


class FusedPermute:
    """A ``Permute`` whose rows move in its own codecs. Its block is not prescaled.

    Args:
        pairs: ``[tokens * top_k]``, see ``RowPermute``.
        scores: ``[tokens, top_k]``, the factors of the experts' outputs.
        find_order: returns the order of this rank's experts; called once, when the rows of dispatch have arrived.
    """

    def __init__(self, pairs: Tensor, scores: Tensor, formats: Formats, find_order: Callable[[], ExpertOrder]) -> None:
        numbers = torch.arange(len(pairs), device=pairs.device)
        row_of = torch.empty_like(pairs).scatter_(0, pairs, numbers).view(-1, scores.shape[1])
        self._orders, self._scores = _Orders(row_of, find_order), scores
        self._combine = FromExperts(self._orders, formats.combine, scores.detach())
        self.codecs = Codecs(
            dispatch=ToExperts(self._orders, formats.dispatch),
            combine=self._combine,
            dispatch_grad=FromExperts(self._orders, formats.dispatch_grad),
            combine_grad=ToExperts(self._orders, formats.combine_grad, scores.detach()),
        )

    def pack(self, tokens: Tensor) -> Tensor:
        return tokens

    def run(self, block: ExpertBlock, arriving: Deferred, counts: Tensor) -> Tensor:
        return block.run_ordered(arriving.wait(), self._orders.arrived)

    def unpack(self, rows: Tensor) -> Tensor:
        """See ``Permute``; combine delivered the sums, and the gradient of the scores is added here."""
        return self._combine.with_gradient_of(self._scores, rows)


class _Orders:
    """Where the rows of one pass go.

    Args:
        row_of: ``[tokens, top_k]``, the number of each row among those that this rank sends.
        find_order: see ``FusedPermute``.
    """

    def __init__(self, row_of: Tensor, find_order: Callable[[], ExpertOrder]) -> None:
        self.row_of, self._find_order = row_of, find_order

    @cached_property
    def arrived(self) -> ExpertOrder:
        """The order of the rows that arrive. It is found when they are first needed, after dispatch has started."""
        return self._find_order()


class ToExperts:
    """A ``Codec`` from the rows of tokens ``[tokens, width]`` to rows in the order of the experts.

    Args:
        orders: where the rows go.
        format: the format of the records; None sends the rows as they are.
        weight: ``[tokens, top_k]``, factors of the rows, or None.
    """

    def __init__(self, orders: _Orders, format: Format | None, weight: Tensor | None = None) -> None:
        self._orders, self._format, self._weight = orders, format, weight

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``; one record for each row to send."""
        row_of = self._orders.row_of
        return _packed(rows, self._format, self._weight, row_of, row_of.numel())

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See ``Codec``; one row for each entry of ``ExpertOrder.source``, zero where there is none."""
        source = self._orders.arrived.source
        if self._format is not None:
            return decode_from(records, self._format, width, dtype, source)
        ordered = records.new_empty(len(source), width)
        _moves_of(records).collect(records, None, source.unsqueeze(1), ordered)
        return ordered


class FromExperts:
    """A ``Codec`` from rows in the order of the experts to the sum of each token's rows ``[tokens, width]``.

    Args:
        orders: where the rows go.
        format: the format of the records; None sends the rows as they are.
        weight: ``[tokens, top_k]``, factors of the rows in the sums, or None.
    """

    records: Tensor | None = None  # those that ``decode`` was given, until ``with_gradient_of`` is called

    def __init__(self, orders: _Orders, format: Format | None, weight: Tensor | None = None) -> None:
        self._orders, self._format, self._weight = orders, format, weight

    def encode(self, rows: Tensor) -> Tensor:
        """See ``Codec``; one record for each row that has arrived for the experts."""
        arrived = self._orders.arrived
        return _packed(rows, self._format, None, arrived.source.unsqueeze(1), arrived.received)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See ``Codec``; one row for each token."""
        row_of = self._orders.row_of
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
        return _WeightGradient.apply(sums, weight, records, self._orders.row_of, self._format)  # type: ignore[return-value]


class _WeightGradient(torch.autograd.Function):
    """The identity for weighted sums; its backward pass computes the gradient of the weights from the records."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, weight: Tensor, records: Tensor, row_of: Tensor, format: Format | None
    ) -> Tensor:
        ctx.save_for_backward(records, row_of)
        ctx.format, ctx.dtype = format, weight.dtype
        return sums.view_as(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        records, row_of = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.format is None:
            dots = _moves_of(records).dots(grad, records, row_of)
        else:
            dots = decode_dots(records, ctx.format, grad, row_of)
        return grad, dots.to(ctx.dtype), None, None, None


def _packed(rows: Tensor, format: Format | None, weight: Tensor | None, places: Tensor, count: int) -> Tensor:
    """``encode_at``; without a format the rows are copied to their places as they are."""
    if format is not None:
        return encode_at(rows, format, weight, places, count)
    moved = rows.new_empty(count, rows.shape[1])
    _moves_of(rows).spread(rows, weight, places, moved)
    return moved


def _moves_of(rows: Tensor) -> Any:
    """The kernels that move rows, on GPUs, and their reference elsewhere."""
    if not rows.is_cuda:
        return rows_reference
    from fcsd.kernels import rows as kernels  # loads Triton

    return kernels
