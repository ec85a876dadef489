"""Differentiable steps of a deduplicating dispatcher: pack records, forward them, open them for the experts, and sum.

The gradient of a step is the mirror of it. Where the forward pass copies a row, the backward pass sums the gradients of
the copies, in fp32 and rounded once. Where it sums rows, the backward pass copies the gradient. The gradient of a
weight is the scalar product of an expert's output (or input, if the weights multiply the inputs) and its gradient. It
arises at the expert's rank and travels back in the tail of the record's gradient.

In ``copies.row_of`` and ``row_of``, -1 stands for no row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.kernels import Copies, copies_reference, rows_reference
from fcsd.parallel.expert.records import Layout, take_entries


class Moves(NamedTuple):
    """The functions that move rows and write records: Triton kernels, or their references in torch.

    The modules ``rows`` and ``copies`` of ``fcsd.kernels`` say what each of them does.
    """

    spread: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    collect: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    dots: Callable[[Tensor, Tensor, Tensor], Tensor]
    number_copies: Callable[[Tensor, int, int, int], Copies]
    write_tails: Callable[[Tensor, Tensor, Tensor, Copies], None]


def moves_by(fused: bool) -> Moves:
    """The kernels, if ``fused``, else their references."""
    if fused:
        from fcsd.kernels import copies, rows  # load Triton
    else:
        copies, rows = copies_reference, rows_reference
    return Moves(rows.spread, rows.collect, rows.dots, copies.number_copies, copies.write_tails)


def write(rows: Tensor, weights: Tensor, copies: Copies, layout: Layout, count: int, moves: Moves) -> Tensor:
    """The records of rows, without autograd.

    Args:
        rows: ``[rows, width]``.
        weights: ``[rows, choices of a row]``.
        copies: where the copies go.
        count: the number of records; records that ``copies`` does not name have an undefined row and no expert.

    Returns: ``[count, values of a record]``.
    """
    records = layout.new(count, rows.device)
    moves.spread(rows, None, copies.row_of, layout.rows(records))
    moves.write_tails(layout.weights(records), layout.experts(records), weights, copies)
    return records


class Pack(torch.autograd.Function):
    """``apply(tokens [tokens, width], weights [tokens, choices], [records], copies, layout, moves)`` -> ``records``.

    The records were written before the host knew how many there are; this is their autograd node. The list is emptied.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, written: list[Tensor], copies: Copies, layout: Layout, moves: Moves
    ) -> Tensor:
        ctx.save_for_backward(copies.row_of, copies.entry_of)
        ctx.layout, ctx.moves = layout, moves
        return written.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        row_of, entry_of = ctx.saved_tensors
        grad, layout = grad.contiguous(), ctx.layout
        tokens = grad.new_empty(len(row_of), layout.width)
        ctx.moves.collect(layout.rows(grad), None, row_of, tokens)
        return tokens, take_entries(layout.weights(grad), entry_of), None, None, None, None


class Relay(torch.autograd.Function):
    """``apply(records, layout of records, copies, layout of copies, count, moves)`` -> ``count`` copies of records.

    A relay sends the row of each record, unchanged, to every rank of its node that has any of the record's experts.
    """

    @staticmethod
    def forward(
        ctx: Any, records: Tensor, layout: Layout, copies: Copies, next_layout: Layout, count: int, moves: Moves
    ) -> Tensor:
        ctx.save_for_backward(copies.row_of, copies.entry_of)
        ctx.layouts, ctx.moves = (layout, next_layout), moves
        return write(layout.rows(records), layout.weights(records), copies, next_layout, count, moves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        row_of, entry_of = ctx.saved_tensors
        layout, next_layout = ctx.layouts
        grad = grad.contiguous()
        summed = layout.new(len(row_of), grad.device)
        ctx.moves.collect(next_layout.rows(grad), None, row_of, layout.rows(summed))
        layout.weights(summed).copy_(take_entries(next_layout.weights(grad), entry_of))
        return summed, None, None, None, None, None


class Open(torch.autograd.Function):
    """``apply(records, layout, row_of, count, weighted, moves)`` -> rows for the experts ``[count, width]``, weights.

    ``row_of [records, choices]`` names the row of each entry. If ``weighted``, the weights multiply these rows, and the
    weights that are returned are not to be used.
    """

    @staticmethod
    def forward(
        ctx: Any, records: Tensor, layout: Layout, row_of: Tensor, count: int, weighted: bool, moves: Moves
    ) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.moves = layout, moves
        ctx.save_for_backward(row_of, records if weighted else None)
        weights = layout.weights(records).clone(memory_format=torch.contiguous_format)
        rows = records.new_empty(count, layout.width)
        moves.spread(layout.rows(records), weights if weighted else None, row_of, rows)
        return rows, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
        layout, moves = ctx.layout, ctx.moves
        row_of, records = ctx.saved_tensors
        summed = layout.new(len(row_of), grad.device)
        weights = None
        if records is not None:
            weights = layout.weights(records).clone(memory_format=torch.contiguous_format)
            grad_weights = moves.dots(layout.rows(records), grad, row_of)
        moves.collect(grad, weights, row_of, layout.rows(summed))
        layout.weights(summed).copy_(grad_weights)
        return summed, None, None, None, None, None


class Collect(torch.autograd.Function):
    """``apply(rows, weights [sums, most] or None, row_of [sums, most], moves)`` -> sums ``[sums, width]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, row_of: Tensor, moves: Moves) -> Tensor:
        ctx.save_for_backward(row_of, weights, None if weights is None else rows)
        ctx.count, ctx.moves = len(rows), moves
        sums = rows.new_empty(len(row_of), rows.shape[1])
        moves.collect(rows, weights, row_of, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        row_of, weights, rows = ctx.saved_tensors
        spread = grad.new_empty(ctx.count, grad.shape[1])
        ctx.moves.spread(grad, weights, row_of, spread)
        return spread, None if rows is None else ctx.moves.dots(grad, rows, row_of), None, None
