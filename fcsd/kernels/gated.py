"""Computes the product of a gated MLP, ``silu(gate) * up``, by one Triton kernel in each direction.

torch starts two kernels forward and three backward, and keeps ``silu(gate)`` for the backward pass. Here the backward
kernel computes it again from ``gate``. All is computed in fp32 and rounded once. ``gated_silu_reference`` computes the
same in torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_BLOCK = 2048  # elements of one program


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


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        product = torch.empty_like(gate)
        _launch(_forward_kernel, gate, up, product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        _launch(_backward_kernel, gate, up, upstream.contiguous(), to_gate, to_up)
        return to_gate, to_up


def _launch(kernel: Any, gate: Tensor, *others: Tensor) -> None:
    count = gate.numel()
    if count:
        with torch.cuda.device_of(gate):
            kernel[(triton.cdiv(count, _BLOCK),)](gate, *others, count, BLOCK=_BLOCK)


@triton.jit
def _forward_kernel(gate, up, product, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + at, (g * tl.sigmoid(g) * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(gate, up, upstream, to_gate, to_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(g)
    silu = g * sigma
    # The derivative of silu is sigma * (1 + g * (1 - sigma)) = sigma + silu * (1 - sigma).
    tl.store(to_gate + at, (d * u * (sigma + silu * (1 - sigma))).to(to_gate.dtype.element_ty), mask=inside)
    tl.store(to_up + at, (d * silu).to(to_up.dtype.element_ty), mask=inside)
