"""Moves rows between tokens and the experts that they chose, by one Triton kernel in each direction.

Every token has ``top_k`` rows. ``row_of[t, k]`` is the number of the row of token t's k-th expert.

    permute:    rows[row_of[t, k]] = weight[t, k] * tokens[t]
    unpermute:  tokens[t] = sum over k of weight[t, k] * rows[row_of[t, k]]

Each function is the gradient of the other. Products and sums are computed in fp32, in the order of k, and rounded once.
There are no atomic additions, so the results of two runs are equal. ``rows_reference.py`` computes the same in torch,
with copies of the rows and an fp32 tensor of ``[tokens, top_k, width]`` that the kernels do not need.

``spread``, ``collect`` and ``dots`` launch the kernels without autograd. They write into tensors that the caller gives,
and a token may have fewer rows than others: -1 in ``row_of`` stands for no row. Rows of ``[n, width]`` may be part of a
tensor of more columns.

On the meta device no kernel starts, and the same tensors are allocated and kept for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_COLUMNS = 1024  # the largest number of columns that one program holds at once


def row_numbers(order: Tensor, top_k: int) -> Tensor:
    """The number of the row of each (token, k) pair, ``[tokens, top_k]``: the inverse of ``order``.

    Args:
        order: ``[tokens * top_k]``, the pair ``t * top_k + k`` that each row holds.
    """
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, rows).view(-1, top_k)


def permute(tokens: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
    """Copy every token to the rows of its experts: ``[tokens, width] -> [tokens * top_k, width]``.

    Differentiable in ``tokens`` and ``weight``.

    Args:
        weight: ``[tokens, top_k]``; None stands for ones.
        row_of: ``[tokens, top_k]``, a permutation of the numbers of the rows.
    """
    return _Permute.apply(tokens, weight, row_of)  # type: ignore[return-value]


def unpermute(rows: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
    """Sum the rows of every token: ``[tokens * top_k, width] -> [tokens, width]``.

    Arguments and gradients are those of ``permute``.
    """
    return _Unpermute.apply(rows, weight, row_of)  # type: ignore[return-value]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(None if weight is None else tokens, weight, row_of)
        return _permute(tokens, weight, row_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        tokens, weight, row_of = ctx.saved_tensors
        return _unpermute(grad, weight, row_of), None if weight is None else _dots(tokens, grad, weight, row_of), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(None if weight is None else rows, weight, row_of)
        return _unpermute(rows, weight, row_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight, row_of = ctx.saved_tensors
        return _permute(grad, weight, row_of), None if weight is None else _dots(grad, rows, weight, row_of), None


def spread(tokens: Tensor, weight: Tensor | None, row_of: Tensor, rows: Tensor) -> None:
    """Copy every token to its rows: ``rows[row_of[t, k]] = weight[t, k] * tokens[t]``.

    Args:
        tokens: ``[tokens, width]``.
        weight: ``[tokens, most]``; None stands for ones.
        row_of: ``[tokens, most]``, the number of a row, or -1. Every number occurs at most once.
        rows: ``[rows, width]``, which is written to. Rows that ``row_of`` does not name keep their values.
    """
    _launch(_permute_kernel, tokens, weight, rows, row_of)


def collect(rows: Tensor, weight: Tensor | None, row_of: Tensor, tokens: Tensor) -> None:
    """Sum the rows of every token into ``tokens [tokens, width]``; the arguments are those of ``spread``."""
    _launch(_unpermute_kernel, tokens, weight, rows, row_of)


def dots(tokens: Tensor, rows: Tensor, row_of: Tensor) -> Tensor:
    """The scalar product of each token with each of its rows, ``[tokens, most]`` in fp32; 0 where there is no row."""
    found = torch.empty(row_of.shape, dtype=torch.float32, device=rows.device)
    _launch(_dots_kernel, tokens, found, rows, row_of)
    return found


def _permute(tokens: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
    rows = tokens.new_empty(row_of.numel(), tokens.shape[1])
    spread(tokens, _plain(weight), row_of, rows)
    return rows


def _unpermute(rows: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
    tokens = rows.new_empty(len(row_of), rows.shape[1])
    collect(rows, _plain(weight), row_of, tokens)
    return tokens


def _dots(tokens: Tensor, rows: Tensor, weight: Tensor, row_of: Tensor) -> Tensor:
    """The gradient of ``weight``, in its dtype."""
    return dots(tokens, rows, row_of).to(weight.dtype)


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().contiguous()


def _launch(kernel: Any, tokens: Tensor, weight: Tensor | None, rows: Tensor, row_of: Tensor) -> None:
    """Start a kernel with one program per token."""
    count, width = tokens.shape
    if not count or tokens.is_meta:
        return
    # Only a tensor that is read may need a copy here: those that are written to have neighbouring columns.
    tokens, rows = (x if x.stride(1) == 1 else x.contiguous() for x in (tokens, rows))
    strides = {"token_stride": tokens.stride(0), "row_stride": rows.stride(0)}
    block = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    options = {"TOP_K": row_of.shape[1], "BLOCK": block, "enable_fp_fusion": False}  # products are rounded, as in torch
    with torch.cuda.device_of(tokens):
        kernel[(count,)](tokens, weight, rows, row_of, width, **strides, **options)


@triton.jit
def _permute_kernel(
    tokens, weight, rows, row_of, width, token_stride, row_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(tokens + token * token_stride + columns, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
            at = tl.load(row_of + token * TOP_K + k)
            y = x
            if weight is not None:
                y = x * tl.load(weight + token * TOP_K + k).to(tl.float32)
            tl.store(rows + at * row_stride + columns, y.to(rows.dtype.element_ty), mask=inside & (at >= 0))


@triton.jit
def _unpermute_kernel(
    tokens, weight, rows, row_of, width, token_stride, row_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
            at = tl.load(row_of + token * TOP_K + k)
            x = tl.load(rows + at * row_stride + columns, mask=inside & (at >= 0), other=0.0).to(tl.float32)
            if weight is not None:
                x = x * tl.load(weight + token * TOP_K + k).to(tl.float32)
            total += x
        tl.store(tokens + token * token_stride + columns, total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def _dots_kernel(tokens, dots, rows, row_of, width, token_stride, row_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.load(row_of + token * TOP_K + k)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            x = tl.load(tokens + token * token_stride + columns, mask=inside, other=0.0).to(tl.float32)
            row = tl.load(rows + at * row_stride + columns, mask=inside & (at >= 0), other=0.0)
            total += x * row.to(tl.float32)
        tl.store(dots + token * TOP_K + k, tl.sum(total, 0).to(dots.dtype.element_ty))
