"""Applies rotary position embeddings to the heads of queries or keys by one Triton kernel in each direction.

transformers' code starts at least five kernels forward and more backward, most of which copy a tensor. Here one kernel
reads every head once and writes it once. All is computed in fp32 and rounded once. ``rotate_reference`` computes the
same in torch.

Some dimensions of a head form pairs, and each pair is rotated by an angle of the token. The other dimensions are
copied. A pair is either dimensions i and i + half, or two neighbours.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_DIMENSIONS = 4096  # the largest number of dimensions, of several heads, that one program holds at once


class Pairs(NamedTuple):
    """Where the pairs of a head are.

    Attributes:
        start: the first dimension that is rotated.
        neighbours: whether neighbours form a pair in the input.
        to_neighbours: whether neighbours form a pair in the output.
    """

    start: int = 0
    neighbours: bool = False
    to_neighbours: bool = False


HALVES = Pairs()  # a head's first half is rotated against its second


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = HALVES) -> Tensor:
    """``rotate`` in torch; arguments and result are those of ``rotate``."""
    wide, half = torch.promote_types(x.dtype, torch.float32), cos.shape[-1]
    c, s = (angles.unsqueeze(1).to(wide) for angles in (cos, sin))
    before, rotated, after = x.to(wide).split([pairs.start, 2 * half, x.shape[-1] - pairs.start - 2 * half], dim=-1)
    first, second = rotated.unflatten(-1, (half, 2)).unbind(-1) if pairs.neighbours else rotated.chunk(2, dim=-1)
    first, second = first * c - second * s, second * c + first * s
    rotated = torch.stack((first, second), -1).flatten(-2) if pairs.to_neighbours else torch.cat((first, second), -1)
    return torch.cat((before, rotated, after), dim=-1).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = HALVES) -> Tensor:
    """Rotate the heads ``x [batch, heads, seq, dim]`` of queries or keys, on a GPU. Differentiable in ``x``.

    Args:
        x: fp32, bf16 or fp16.
        cos, sin: of the angle of each pair, ``[batch or 1, seq, half]``.
        pairs: which dimensions form pairs.

    Returns: a tensor of the shape and dtype of ``x``, in the same order in memory if ``x`` is dense.
    """
    return _Rotate.apply(x, cos, sin, pairs)  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = Pairs(pairs.start, pairs.to_neighbours, pairs.neighbours)
        return _launch(_rotate_kernel, x, cos, sin, pairs, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch(_rotate_kernel, upstream, cos, sin, ctx.back, backward=True), None, None, None


def _launch(kernel: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, backward: bool) -> Tensor:
    """Rotate by the angles, or back, with a program for each token and some of its heads."""
    x = x if x.stride(3) == 1 else x.contiguous()
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    batch, heads, seq, dim = x.shape
    width = triton.next_power_of_2(dim)
    block = min(triton.next_power_of_2(heads), max(1, _MOST_DIMENSIONS // width))
    angles = (cos.stride(0) if len(cos) > 1 else 0, *cos.stride()[1:])
    if x.numel():
        with torch.cuda.device_of(x):
            kernel[(batch * seq, triton.cdiv(heads, block))](
                x, cos, sin, out, heads, seq, *angles, *x.stride()[:3], *out.stride()[:3],
                DIM=dim, START=pairs.start, HALF=cos.shape[2], FROM=pairs.neighbours, TO=pairs.to_neighbours,
                BACKWARD=backward, PAIRS=triton.next_power_of_2(cos.shape[2]), WIDTH=width, BLOCK=block,
                num_warps=max(1, min(4, block * width // 512)),
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
    angle_batch,
    angle_token,
    angle_pair,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    DIM: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BACKWARD: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch, token = (tl.program_id(0) // seq).to(tl.int64), (tl.program_id(0) % seq).to(tl.int64)
    head, pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, PAIRS)
    angle = batch * angle_batch + token * angle_token + pair * angle_pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        s = -s
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head
    target = out + batch * out_batch + token * out_token + head[:, None] * out_head
    pair = pair[None, :]
    first_from, second_from = START + pair, START + HALF + pair
    if FROM:
        first_from, second_from = START + 2 * pair, START + 2 * pair + 1
    first_to, second_to = START + pair, START + HALF + pair
    if TO:
        first_to, second_to = START + 2 * pair, START + 2 * pair + 1
    first = tl.load(source + first_from, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_from, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first_to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + second_to, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if DIM > 2 * HALF:
        other = tl.arange(0, WIDTH)[None, :]
        inside = (head < heads)[:, None] & (other < DIM) & ((other < START) | (other >= START + 2 * HALF))
        tl.store(target + other, tl.load(source + other, mask=inside), mask=inside)
