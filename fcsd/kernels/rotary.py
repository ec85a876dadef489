"""Applies rotary position embeddings to queries and keys by one Triton kernel in each direction.

transformers' code starts at least ten kernels forward and more backward, most of which copy a tensor. Here one kernel
reads every head once and writes it once. All is computed in fp32 and rounded once. ``rotate_reference`` computes the
same in torch.

Some dimensions of a head form pairs, and each pair is rotated by an angle of the token. The other dimensions are
copied. A pair is either dimensions i and i + half, or two neighbours.

On the meta device no kernel starts, and the same tensors are allocated and kept for the backward pass.
"""

# pyright: reportAttributeAccessIssue=false
# Triton gives the attributes of the tuples QUERIES, KEYS and ANGLES, which pyright does not know of.

from functools import cache
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
    """``rotate`` of queries alone or keys alone, in torch; the arguments are those of ``rotate``."""
    wide, half = torch.promote_types(x.dtype, torch.float32), cos.shape[-1]
    c, s = (angles.unsqueeze(1).to(wide) for angles in (cos, sin))
    before, rotated, after = x.to(wide).split([pairs.start, 2 * half, x.shape[-1] - pairs.start - 2 * half], dim=-1)
    first, second = rotated.unflatten(-1, (half, 2)).unbind(-1) if pairs.neighbours else rotated.chunk(2, dim=-1)
    first, second = first * c - second * s, second * c + first * s
    rotated = torch.stack((first, second), -1).flatten(-2) if pairs.to_neighbours else torch.cat((first, second), -1)
    return torch.cat((before, rotated, after), dim=-1).to(x.dtype)


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = HALVES, of_keys: Pairs | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, ``[batch, heads, seq, dim]`` each, on a GPU. Differentiable in both.

    Args:
        queries, keys: fp32, bf16 or fp16. They may have different numbers of heads and of dimensions.
        cos, sin: of the angle of each pair, ``[batch or 1, seq, half]``.
        pairs: which dimensions form pairs in queries.
        of_keys: which do in keys; None for the same.

    Returns: tensors of the same shapes and dtypes, which lie in memory as ``[batch, seq, heads, dim]``.
    """
    return _Rotate.apply(queries, keys, cos, sin, pairs, of_keys or pairs)  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, of_keys: Pairs
    ) -> tuple[Tensor, Tensor]:
        half, seq = cos.shape[2], cos.shape[1]
        if cos.stride() != sin.stride() or (len(cos) > 1 and cos.stride(0) != seq * cos.stride(1)):
            cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.back = [Pairs(each.start, each.to_neighbours, each.neighbours) for each in (pairs, of_keys)]
        ctx.angles = _Angles(len(cos) > 1, cos.stride(1), cos.stride(2), half, 1 << (half - 1).bit_length())
        return _launch(_rotate_kernel, queries, keys, cos, sin, [pairs, of_keys], ctx.angles, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_queries: Tensor, to_keys: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        gradients = _launch(_rotate_kernel, to_queries, to_keys, cos, sin, ctx.back, ctx.angles, True)
        return (*gradients, None, None, None, None)


class _Angles(NamedTuple):
    """The angles of a token, as the kernel needs to know them.

    Attributes:
        each: whether every row of the batch has its own.
        token: the distance in memory between two tokens.
        pair: the distance between two pairs.
        half: the number of pairs.
        block: the power of two that holds them.
    """

    each: bool
    token: int
    pair: int
    half: int
    block: int


class _Heads(NamedTuple):
    """The heads of queries or keys, as the kernel needs to know them.

    Attributes:
        heads: their number.
        dim: the dimensions of a head.
        start, neighbours, to_neighbours: see ``Pairs``.
        width: the power of two that holds a head.
        block: how many heads a program holds.
        programs: how many programs share a token.
    """

    heads: int
    dim: int
    start: int
    neighbours: bool
    to_neighbours: bool
    width: int
    block: int
    programs: int


@cache  # a small tensor takes less time than these lines
def _heads(heads: int, dim: int, pairs: Pairs) -> _Heads:
    width = 1 << (dim - 1).bit_length()
    block = min(1 << (heads - 1).bit_length(), max(1, _MOST_DIMENSIONS // width))
    return _Heads(heads, dim, *pairs, width, block, -(-heads // block))


def _launch(
    kernel: Any,
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairs: list[Pairs],
    angles: _Angles,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate by the angles, or back, with a program for each token and some of its heads."""
    queries, keys = (x if x.stride(3) == 1 else x.contiguous() for x in (queries, keys))
    batch, _, seq, _ = queries.shape
    q, k = (_heads(x.shape[1], x.shape[3], each) for x, each in zip((queries, keys), pairs, strict=True))
    rotated = [x.new_empty(batch, seq, of.heads, of.dim) for x, of in ((queries, q), (keys, k))]
    if batch * seq and not queries.is_meta:
        with torch.cuda.device_of(queries):
            kernel[(batch * seq, q.programs + k.programs)](
                queries, keys, cos, sin, *rotated, seq, *queries.stride()[:3], *keys.stride()[:3],
                QUERIES=q, KEYS=k, ANGLES=angles, BACK=back,
                num_warps=max(1, min(4, q.block * q.width // 512)),
            )  # fmt: skip
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


@triton.jit
def _rotate_kernel(
    queries,
    keys,
    cos,
    sin,
    to_queries,
    to_keys,
    seq,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_token,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ANGLES: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // seq, row % seq
    pair = tl.arange(0, ANGLES.block)
    angle = (row if ANGLES.each else token) * ANGLES.token + pair * ANGLES.pair
    c = tl.load(cos + angle, mask=pair < ANGLES.half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=pair < ANGLES.half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    block = tl.program_id(1)
    if block < QUERIES.programs:
        source = queries + batch * query_batch + token * query_token
        _rotate_heads(source, to_queries, row, query_head, block, c, s, pair[None, :], QUERIES, ANGLES.half)
    else:
        source = keys + batch * key_batch + token * key_token
        _rotate_heads(source, to_keys, row, key_head, block - QUERIES.programs, c, s, pair[None, :], KEYS, ANGLES.half)


@triton.jit
def _rotate_heads(source, out, row, head_stride, block, c, s, pair, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate a block of heads of one token."""
    head = (block * HEADS.block + tl.arange(0, HEADS.block)).to(tl.int64)[:, None]
    source += head * head_stride
    target = out + (row * HEADS.heads + head) * HEADS.dim
    first_from, second_from = HEADS.start + pair, HEADS.start + HALF + pair
    if HEADS.neighbours:
        first_from, second_from = HEADS.start + 2 * pair, HEADS.start + 2 * pair + 1
    first_to, second_to = HEADS.start + pair, HEADS.start + HALF + pair
    if HEADS.to_neighbours:
        first_to, second_to = HEADS.start + 2 * pair, HEADS.start + 2 * pair + 1
    inside = (head < HEADS.heads) & (pair < HALF)
    first = tl.load(source + first_from, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_from, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first_to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + second_to, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if HEADS.dim > 2 * HALF:
        other = tl.arange(0, HEADS.width)[None, :]
        inside = (head < HEADS.heads) & (other < HEADS.dim)
        inside = inside & ((other < HEADS.start) | (other >= HEADS.start + 2 * HALF))
        tl.store(target + other, tl.load(source + other, mask=inside), mask=inside)
