"""Applies rotary position embeddings to the heads of queries or keys by one Triton kernel in each direction.

transformers' ``apply_rotary_pos_emb`` starts five kernels forward and more backward, most of which copy a tensor. Here
one kernel reads every head once and writes it once. All is computed in fp32 and rounded once. ``rotate_reference``
computes the same in torch.

A head's first half is rotated against its second: dimensions i and i + half, by the angle of the token and of i. If the
angles have fewer dimensions than a head, the other dimensions are copied.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_PAIRS = 2048  # the largest number of pairs of dimensions that one program holds at once


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate`` in torch; arguments and result are those of ``rotate``."""
    wide, half = torch.promote_types(x.dtype, torch.float32), cos.shape[-1] // 2
    c, s = (angles[:, None, :, :half].to(wide) for angles in (cos, sin))
    first, second, rest = x.to(wide).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads ``x [batch, heads, seq, dim]`` of queries or keys, on a GPU. Differentiable in ``x``.

    Args:
        x: fp32, bf16 or fp16.
        cos, sin: of the angles, ``[batch or 1, seq, 2 * half]``, 2 * half <= dim. The second half repeats the first.

    Returns: a tensor of the shape and dtype of ``x``, in the same order in memory if ``x`` is dense.
    """
    return _Rotate.apply(x, cos, sin)  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return _launch(upstream, *ctx.saved_tensors, backward=True), None, None


def _launch(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Rotate by the angles, or back, with a program for each token and up to ``_MOST_PAIRS`` pairs of dimensions."""
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    batch, heads, seq, dim = x.shape
    half = cos.shape[2] // 2
    pairs = triton.next_power_of_2(half)
    block = min(triton.next_power_of_2(heads), max(1, _MOST_PAIRS // pairs))
    angles = seq * 2 * half if len(cos) > 1 else 0  # of one row of the batch to the next
    if x.numel():
        with torch.cuda.device_of(x):
            _rotate_kernel[(batch * seq, triton.cdiv(heads, block))](
                x, cos, sin, out, heads, seq, angles, *x.stride()[:3], *out.stride()[:3],
                HALF=half, REST=dim - 2 * half, PAIRS=pairs, BLOCK=block, BACKWARD=backward,
                TAIL=triton.next_power_of_2(max(1, dim - 2 * half)), num_warps=max(1, min(4, block * pairs // 256)),
            )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    x,
    cos,
    sin,
    out,
    heads,
    seq,
    angles,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    batch, token = (tl.program_id(0) // seq).to(tl.int64), (tl.program_id(0) % seq).to(tl.int64)
    head, pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, PAIRS)
    at = batch * angles + token * 2 * HALF + pair
    c = tl.load(cos + at, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        s = -s
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head
    target = out + batch * out_batch + token * out_token + head[:, None] * out_head
    first = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + pair[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF + pair[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        tail = tl.arange(0, TAIL)
        inside = (head < heads)[:, None] & (tail < REST)[None, :]
        rest = tl.load(source + 2 * HALF + tail[None, :], mask=inside, other=0.0)
        tl.store(target + 2 * HALF + tail[None, :], rest, mask=inside)
