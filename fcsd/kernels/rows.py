"""Moves rows between tokens and the experts that they chose, by one Triton kernel in each direction.

Every token has ``top_k`` rows. ``row_of[t, k]`` is the number of the row of token t's k-th expert.

    permute:    rows[row_of[t, k]] = weight[t, k] * tokens[t]
    unpermute:  tokens[t] = sum over k of weight[t, k] * rows[row_of[t, k]]

Each function is the gradient of the other. Products and sums are computed in fp32, in the order of k, and rounded once.
There are no atomic additions, so the results of two runs are equal. ``rows_reference.py`` computes the same in torch,
with copies of the rows and an fp32 tensor of ``[tokens, top_k, width]`` that the kernels do not need.
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


def _permute(tokens: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
    rows = tokens.new_empty(row_of.numel(), tokens.shape[1])
    _launch(_permute_kernel, tokens.contiguous(), _plain(weight), rows, row_of)
    return rows


def _unpermute(rows: Tensor, weight: Tensor | None, row_of: Tensor) -> Tensor:
    tokens = rows.new_empty(len(row_of), rows.shape[1])
    _launch(_unpermute_kernel, tokens, _plain(weight), rows.contiguous(), row_of)
    return tokens


def _dots(tokens: Tensor, rows: Tensor, weight: Tensor, row_of: Tensor) -> Tensor:
    """The gradient of ``weight``: the scalar product of each token with each of its rows, ``[tokens, top_k]``."""
    dots = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _launch(_dots_kernel, tokens.contiguous(), dots, rows.contiguous(), row_of)
    return dots


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().contiguous()


def _launch(kernel: Any, tokens: Tensor, weight: Tensor | None, rows: Tensor, row_of: Tensor) -> None:
    """Start a kernel with one program per token."""
    count, width = tokens.shape
    block = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(tokens):
        kernel[(count,)](tokens, weight, rows, row_of, width, TOP_K=row_of.shape[1], BLOCK=block)


@triton.jit
def _permute_kernel(tokens, weight, rows, row_of, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(tokens + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
            at = tl.load(row_of + token * TOP_K + k)
            y = x
            if weight is not None:
                y = x * tl.load(weight + token * TOP_K + k).to(tl.float32)
            tl.store(rows + at * width + columns, y.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _unpermute_kernel(tokens, weight, rows, row_of, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
            at = tl.load(row_of + token * TOP_K + k)
            x = tl.load(rows + at * width + columns, mask=inside, other=0.0).to(tl.float32)
            if weight is not None:
                x = x * tl.load(weight + token * TOP_K + k).to(tl.float32)
            total += x
        tl.store(tokens + token * width + columns, total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def _dots_kernel(tokens, dots, rows, row_of, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.load(row_of + token * TOP_K + k)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            x = tl.load(tokens + token * width + columns, mask=inside, other=0.0).to(tl.float32)
            total += x * tl.load(rows + at * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dots + token * TOP_K + k, tl.sum(total, 0).to(dots.dtype.element_ty))
