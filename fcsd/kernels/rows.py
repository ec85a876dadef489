"""Rows between tokens and the experts they chose: each token's row out to its top-k places, and those rows back.

    spread:   rows[place[t, k]] = weight[t, k] * tokens[t]
    collect:  tokens[t] = sum over k of weight[t, k] * rows[place[t, k]]

Either is the other's gradient. Products and sums are fp32, rounded once, in the order of k; there are no atomics, so
results do not change from run to run. ``fcsd.parallel.expert.block`` has the same in torch, with the copies and the
fp32 tensor of ``[tokens, top_k, width]`` that are saved here.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_COLUMNS = 1024  # that a program holds at once


def places(order: Tensor, top_k: int) -> Tensor:
    """The row of each (token, choice) pair ``[tokens, top_k]``, where row i holds pair ``order[i]``."""
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, rows).view(-1, top_k)


def spread(tokens: Tensor, weight: Tensor | None, place: Tensor) -> Tensor:
    """``[tokens, width] -> [tokens * top_k, width]``; differentiable in ``tokens`` and ``weight``.

    Args:
        weight: ``[tokens, top_k]``; None is 1 for all.
        place: ``[tokens, top_k]``, a permutation of the rows' numbers.
    """
    return _Spread.apply(tokens, weight, place)  # type: ignore[return-value]


def collect(rows: Tensor, weight: Tensor | None, place: Tensor) -> Tensor:
    """``[tokens * top_k, width] -> [tokens, width]``; arguments and gradients as ``spread``'s."""
    return _Collect.apply(rows, weight, place)  # type: ignore[return-value]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor | None, place: Tensor) -> Tensor:
        ctx.save_for_backward(None if weight is None else tokens, weight, place)
        return _spread(tokens, weight, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        tokens, weight, place = ctx.saved_tensors
        return _collect(grad, weight, place), None if weight is None else _dots(tokens, grad, weight, place), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, place: Tensor) -> Tensor:
        ctx.save_for_backward(None if weight is None else rows, weight, place)
        return _collect(rows, weight, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight, place = ctx.saved_tensors
        return _spread(grad, weight, place), None if weight is None else _dots(grad, rows, weight, place), None


def _spread(tokens: Tensor, weight: Tensor | None, place: Tensor) -> Tensor:
    rows = tokens.new_empty(place.numel(), tokens.shape[1])
    _launch(_spread_kernel, tokens.contiguous(), _plain(weight), rows, place)
    return rows


def _collect(rows: Tensor, weight: Tensor | None, place: Tensor) -> Tensor:
    tokens = rows.new_empty(len(place), rows.shape[1])
    _launch(_collect_kernel, tokens, _plain(weight), rows.contiguous(), place)
    return tokens


def _dots(tokens: Tensor, rows: Tensor, weight: Tensor, place: Tensor) -> Tensor:
    """The gradient of ``weight``: of each token's row with each of its ``rows``, the scalar product."""
    dots = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _launch(_dots_kernel, tokens.contiguous(), dots, rows.contiguous(), place)
    return dots


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().contiguous()


def _launch(kernel: Any, tokens: Tensor, weight: Tensor | None, rows: Tensor, place: Tensor) -> None:
    """One program per token."""
    count, width = tokens.shape
    block = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(tokens):
        kernel[(count,)](tokens, weight, rows, place, width, TOP_K=place.shape[1], BLOCK=block)


@triton.jit
def _spread_kernel(tokens, weight, rows, place, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(tokens + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
            at = tl.load(place + token * TOP_K + k)
            y = x
            if weight is not None:
                y = x * tl.load(weight + token * TOP_K + k).to(tl.float32)
            tl.store(rows + at * width + columns, y.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _collect_kernel(tokens, weight, rows, place, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
            at = tl.load(place + token * TOP_K + k)
            x = tl.load(rows + at * width + columns, mask=inside, other=0.0).to(tl.float32)
            if weight is not None:
                x = x * tl.load(weight + token * TOP_K + k).to(tl.float32)
            total += x
        tl.store(tokens + token * width + columns, total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def _dots_kernel(tokens, dots, rows, place, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        at = tl.load(place + token * TOP_K + k)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            x = tl.load(tokens + token * width + columns, mask=inside, other=0.0).to(tl.float32)
            total += x * tl.load(rows + at * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dots + token * TOP_K + k, tl.sum(total, 0).to(dots.dtype.element_ty))
