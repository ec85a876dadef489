"""Makes the keys of multi-head latent attention (MLA) by one Triton kernel in each direction.

A key is a part of its head's own, which a projection of the latent gives together with the value, and a rotated part
that all heads share. transformers copies both into a new tensor, each by a kernel, and its backward pass joins the
gradients of keys and values in another tensor. Here one kernel writes the keys, and one writes all gradients. The
gradient of the shared part is a sum over heads, in fp32 and rounded once. ``expand_reference`` computes the same in
torch.

On the meta device no kernel starts, and the same tensors are allocated and kept for the backward pass.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuple FORM, which pyright does not know of.

from functools import cache
from typing import Any, NamedTuple

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
        batch, seq, heads, dim = projected.shape
        ctx.form, ctx.shape = _form(heads, own, shared.shape[3], dim - own), projected.shape
        keys = projected.new_empty(batch, seq, heads, own + shared.shape[3])
        _launch(_keys_kernel, (projected, shared, keys), ctx)
        return keys.transpose(1, 2), projected[..., own:].transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_keys: Tensor, to_values: Tensor) -> tuple[Tensor, Tensor, None]:
        to_keys, to_values = (x if x.stride(3) == 1 else x.contiguous() for x in (to_keys, to_values))
        batch, seq = ctx.shape[:2]
        to_projected, to_shared = to_keys.new_empty(ctx.shape), to_keys.new_empty(batch, 1, seq, ctx.form.rotated)
        strides = (*to_keys.stride()[:3], *to_values.stride()[:3])
        _launch(_gradient_kernel, (to_keys, to_values, to_projected, to_shared), ctx, seq, *strides)
        return to_projected, to_shared, None


class _Form(NamedTuple):
    """Keys and values, as the kernels need to know them.

    Attributes:
        heads: their number.
        own, rotated, values: the dimensions of the own part of a key, of the shared part, and of a value.
        own_block, rotated_block, values_block: the powers of two that hold them.
        block: how many heads a program holds at once.
    """

    heads: int
    own: int
    rotated: int
    values: int
    own_block: int
    rotated_block: int
    values_block: int
    block: int


@cache  # a small tensor takes less time than these lines
def _form(heads: int, own: int, rotated: int, values: int) -> _Form:
    own_block, rotated_block, values_block = (1 << (width - 1).bit_length() for width in (own, rotated, values))
    most = max(1, _MOST_DIMENSIONS // max(own_block, rotated_block, values_block))
    block = min(1 << (heads - 1).bit_length(), most)
    return _Form(heads, own, rotated, values, own_block, rotated_block, values_block, block)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], ctx: Any, *numbers: int) -> None:
    """Starts a kernel with one program for each token."""
    tokens = ctx.shape[0] * ctx.shape[1]
    if tokens and not tensors[0].is_meta:
        with torch.cuda.device_of(tensors[0]):
            kernel[(tokens,)](*tensors, *numbers, FORM=ctx.form)


@triton.jit
def _keys_kernel(projected, shared, keys, FORM: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column, rotated = tl.arange(0, FORM.own_block)[None, :], tl.arange(0, FORM.rotated_block)[None, :]
    same = tl.load(shared + token * FORM.rotated + rotated, mask=rotated < FORM.rotated)
    BLOCK: tl.constexpr = FORM.block
    ROTATED: tl.constexpr = FORM.rotated_block
    same = tl.broadcast_to(same, (BLOCK, ROTATED))
    for start in range(0, FORM.heads, FORM.block):
        head = start + tl.arange(0, FORM.block)[:, None]
        row = token * FORM.heads + head
        target = keys + row * (FORM.own + FORM.rotated)
        inside = (head < FORM.heads) & (column < FORM.own)
        x = tl.load(projected + row * (FORM.own + FORM.values) + column, mask=inside)
        tl.store(target + column, x, mask=inside)
        tl.store(target + FORM.own + rotated, same, mask=(head < FORM.heads) & (rotated < FORM.rotated))


@triton.jit
def _gradient_kernel(
    to_keys,
    to_values,
    to_projected,
    to_shared,
    seq,
    key_batch,
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    FORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // seq, row % seq
    of_keys = to_keys + batch * key_batch + token * key_token
    of_values = to_values + batch * value_batch + token * value_token
    column, rotated = tl.arange(0, FORM.own_block)[None, :], tl.arange(0, FORM.rotated_block)[None, :]
    value = tl.arange(0, FORM.values_block)[None, :]
    ROTATED: tl.constexpr = FORM.rotated_block
    total = tl.zeros([1, ROTATED], tl.float32)
    for start in range(0, FORM.heads, FORM.block):
        head = (start + tl.arange(0, FORM.block)[:, None]).to(tl.int64)
        target = to_projected + (row * FORM.heads + head) * (FORM.own + FORM.values)
        inside = (head < FORM.heads) & (column < FORM.own)
        tl.store(target + column, tl.load(of_keys + head * key_head + column, mask=inside), mask=inside)
        inside = (head < FORM.heads) & (value < FORM.values)
        tl.store(target + FORM.own + value, tl.load(of_values + head * value_head + value, mask=inside), mask=inside)
        inside = (head < FORM.heads) & (rotated < FORM.rotated)
        part = tl.load(of_keys + head * key_head + FORM.own + rotated, mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), 0, keep_dims=True)
    tl.store(
        to_shared + row * FORM.rotated + rotated, total.to(to_shared.dtype.element_ty), mask=rotated < FORM.rotated
    )
