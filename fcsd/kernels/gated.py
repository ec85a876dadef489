"""Computes the product of a gated MLP, ``silu(gate) * up``, by one Triton kernel in each direction.

torch starts two kernels forward and three backward, and keeps ``silu(gate)`` for the backward pass. Here the backward
kernel computes it again from ``gate``. All is computed in fp32 and rounded once. ``gated_silu_reference`` computes the
same in torch.

``gate`` and ``up`` are two tensors, or, in routed experts, the two halves of each row of one tensor. In the second case
the gradient is written into one tensor as well, so that nothing is copied.

On the meta device no kernel starts, and the same tensors are allocated and kept for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_BLOCK = 1024  # elements of one program


def gated_silu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in torch; arguments and result are those of ``gated_silu``."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``. Differentiable in both.

    Args:
        gate, up: tensors of one shape and dtype (fp32, bf16 or fp16), on a GPU.

    Returns: a tensor of their shape and dtype.
    """
    return _GatedSilu.apply(gate, up)  # type: ignore[return-value]


def gated_silu_halves(rows: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows ``[rows, 2 * width]`` that hold ``gate`` and ``up`` side by side. Differentiable.

    Returns: ``[rows, width]`` in the dtype of ``rows``.
    """
    return _GatedSiluHalves.apply(rows)  # type: ignore[return-value]


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        product = torch.empty_like(gate)
        _launch(_forward_kernel, (gate.view(1, -1), up, product), gate.numel())
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        _launch(_backward_kernel, (gate.view(1, -1), up, upstream.contiguous(), to_gate, to_up), gate.numel())
        return to_gate, to_up


class _GatedSiluHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows)
        width = rows.shape[1] // 2
        product = rows.new_empty(len(rows), width)
        _launch(_forward_kernel, (rows, rows[:, width:], product), width)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        width = rows.shape[1] // 2
        gradient = torch.empty_like(rows)
        halves = gradient, gradient[:, width:]
        _launch(_backward_kernel, (rows, rows[:, width:], upstream.contiguous(), *halves), width)
        return gradient


def _launch(kernel: Any, tensors: tuple[Tensor, ...], width: int) -> None:
    """Starts a kernel with a program for each block of columns of each row.

    Args:
        tensors: the kernel's tensors. The first is ``gate`` in the form ``[rows, stride]``.
        width: the number of columns that are computed.
    """
    gate = tensors[0]
    if width and len(gate) and not gate.is_meta:
        blocks = triton.cdiv(width, _BLOCK)
        with torch.cuda.device_of(gate):
            kernel[(len(gate) * blocks,)](*tensors, width, gate.stride(0), blocks, BLOCK=_BLOCK)


@triton.jit
def _forward_kernel(gate, up, product, width, stride, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + row * width + columns, (g * tl.sigmoid(g) * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(gate, up, upstream, to_gate, to_up, width, stride, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * stride + columns
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(upstream + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(g)
    silu = g * sigma
    # The derivative of silu is sigma * (1 + g * (1 - sigma)) = sigma + silu * (1 - sigma).
    tl.store(to_gate + at, (d * u * (sigma + silu * (1 - sigma))).to(to_gate.dtype.element_ty), mask=inside)
    tl.store(to_up + at, (d * silu).to(to_up.dtype.element_ty), mask=inside)
