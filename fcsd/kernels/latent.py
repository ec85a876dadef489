"""Makes the keys of multi-head latent attention (MLA) by one Triton kernel in each direction.

A key is a part of its head's own, which a projection of the latent gives together with the value, and a rotated part
that all heads share. transformers copies both into a new tensor, each by a kernel, and its backward pass joins the
gradients of keys and values in another tensor. Here one kernel writes the keys, and one writes all gradients. The
gradient of the shared part is a sum over heads, in fp32 and rounded once. ``expand_reference`` computes the same in
torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_DIMENSIONS = 4096  # the largest number of dimensions, of several heads, that one program holds at once


def expand_reference(projected: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """``expand`` in torch; arguments and results are those of ``expand``."""
    keys, values = projected.transpose(1, 2).split([own, projected.shape[-1] - own], dim=-1)
    return torch.cat((keys, shared.expand(-1, keys.shape[1], -1, -1)), dim=-1), values


def expand(projected: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The keys ``[batch, heads, seq, own + rotated]`` and values ``[batch, heads, seq, value]`` of each head, on a GPU.

    Differentiable in ``projected`` and ``shared``.

    Args:
        projected: ``[batch, seq, heads, own + value]``, the own part of each key, and the value.
        shared: ``[batch, 1, seq, rotated]``, the part that is the same for all heads, of the same dtype.
        own: the number of dimensions of a key that are its head's own.

    Returns: the keys, which lie in memory as ``[batch, seq, heads, own + rotated]``, and the values, which are part of
        ``projected``.
    """
    return _Keys.apply(projected, shared, own)  # type: ignore[return-value]


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
        projected, shared = projected.contiguous(), shared.contiguous()
        batch, seq, heads, _ = projected.shape
        ctx.shape, ctx.own, ctx.rotated = projected.shape, own, shared.shape[3]
        keys = projected.new_empty(batch, seq, heads, own + ctx.rotated)
        _launch(_keys_kernel, (projected, shared, keys), ctx, heads)
        return keys.transpose(1, 2), projected[..., own:].transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_keys: Tensor, to_values: Tensor) -> tuple[Tensor, Tensor, None]:
        to_keys, to_values = (x if x.stride(3) == 1 else x.contiguous() for x in (to_keys, to_values))
        batch, seq, heads, _ = ctx.shape
        to_projected, to_shared = to_keys.new_empty(ctx.shape), to_keys.new_empty(batch, 1, seq, ctx.rotated)
        strides = (*to_keys.stride()[:3], *to_values.stride()[:3])
        _launch(_gradient_kernel, (to_keys, to_values, to_projected, to_shared), ctx, heads, seq, *strides)
        return to_projected, to_shared, None


def _launch(kernel: Any, tensors: tuple[Tensor, ...], ctx: Any, *numbers: int) -> None:
    """Starts a kernel with one program for each token."""
    batch, seq, heads, dim = ctx.shape
    widths = [triton.next_power_of_2(width) for width in (ctx.own, ctx.rotated, dim - ctx.own)]
    sizes = {"OWN": ctx.own, "SHARED": ctx.rotated, "VALUE": dim - ctx.own}
    blocks = dict(zip(("OWN_BLOCK", "SHARED_BLOCK", "VALUE_BLOCK"), widths, strict=True))
    block = min(triton.next_power_of_2(heads), max(1, _MOST_DIMENSIONS // max(widths)))
    if batch * seq:
        with torch.cuda.device_of(tensors[0]):
            kernel[(batch * seq,)](*tensors, *numbers, **sizes, **blocks, BLOCK=block)


@triton.jit
def _keys_kernel(
    projected,
    shared,
    keys,
    heads,
    OWN: tl.constexpr,
    SHARED: tl.constexpr,
    VALUE: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column, rotated = tl.arange(0, OWN_BLOCK)[None, :], tl.arange(0, SHARED_BLOCK)[None, :]
    same = tl.load(shared + token * SHARED + rotated, mask=rotated < SHARED)
    for start in range(0, heads, BLOCK):
        head = start + tl.arange(0, BLOCK)[:, None]
        row = token * heads + head
        inside = (head < heads) & (column < OWN)
        x = tl.load(projected + row * (OWN + VALUE) + column, mask=inside)
        tl.store(keys + row * (OWN + SHARED) + column, x, mask=inside)
        inside = (head < heads) & (rotated < SHARED)
        tl.store(keys + row * (OWN + SHARED) + OWN + rotated, tl.broadcast_to(same, (BLOCK, SHARED_BLOCK)), mask=inside)


@triton.jit
def _gradient_kernel(
    to_keys,
    to_values,
    to_projected,
    to_shared,
    heads,
    seq,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    OWN: tl.constexpr,
    SHARED: tl.constexpr,
    VALUE: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    batch, token = number // seq, number % seq
    of_keys = to_keys + batch * key_batch + token * key_token
    of_values = to_values + batch * value_batch + token * value_token
    column, rotated = tl.arange(0, OWN_BLOCK)[None, :], tl.arange(0, SHARED_BLOCK)[None, :]
    value = tl.arange(0, VALUE_BLOCK)[None, :]
    total = tl.zeros([1, SHARED_BLOCK], tl.float32)
    for start in range(0, heads, BLOCK):
        head = (start + tl.arange(0, BLOCK)[:, None]).to(tl.int64)
        target = to_projected + (number * heads + head) * (OWN + VALUE)
        inside = (head < heads) & (column < OWN)
        tl.store(target + column, tl.load(of_keys + head * key_head + column, mask=inside), mask=inside)
        inside = (head < heads) & (value < VALUE)
        tl.store(target + OWN + value, tl.load(of_values + head * value_head + value, mask=inside), mask=inside)
        inside = (head < heads) & (rotated < SHARED)
        part = tl.load(of_keys + head * key_head + OWN + rotated, mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), 0, keep_dims=True)
    tl.store(to_shared + number * SHARED + rotated, total.to(to_shared.dtype.element_ty), mask=rotated < SHARED)
