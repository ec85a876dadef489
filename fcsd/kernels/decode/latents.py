"""Computes the attention of one query token of each row to latents (MLA) by a Triton kernel that expands no latent.

A head's key is a projection of the latent of its token, and a rotated part that all heads share; its value is another
projection of the same latent. A product with a projected latent equals a product of the projected query with the latent
itself, and a weighted sum of projected latents is the projection of their weighted sum. So all heads attend to the
latents as they lie in the cache, and each latent is read once for its key and its value. Source: DeepSeek-V2
(arXiv 2405.04434), section 2.1.2, where the projections are absorbed.

The keys are divided into parts and ranges are on the device, as in ``attention.py``, which combines the parts.
``latent_attention_reference`` computes the same in torch.

Scores and sums are fp32. The weights are rounded to the dtype of the latents before the product with them.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fcsd.kernels.decode.attention import (
    add_keys,
    combine,
    decode_attention_reference,
    keys_at_once,
    keys_of_part,
    padded,
    usual_parts,
)

_MEMBERS = 16  # heads of one program, the fewest that ``tl.dot`` takes
_PROGRAMS = 2  # for each multiprocessor, if there are enough keys; more have to write and combine more parts


def latent_attention_reference(
    query: Tensor, rotated: Tensor, latent: Tensor, shared: Tensor, ranges: Tensor, scale: float
) -> Tensor:
    """``latent_attention`` in torch, on any device and in any dtype: all heads share one key and one value."""
    keys = torch.cat([latent, shared], -1)[:, None]
    return decode_attention_reference(torch.cat([query, rotated], -1), keys, latent[:, None], ranges, scale)


# An operator of torch is one node for torch.compile, which does not look inside.
@torch.library.custom_op("fcsd::latent_attention", mutates_args=())
def latent_attention(
    query: Tensor,
    rotated: Tensor,
    latent: Tensor,
    shared: Tensor,
    ranges: Tensor,
    scale: float,
    parts: int | None = None,
) -> Tensor:
    """Attention of one query token of each row to the latents in the row's range. Not differentiable.

    Args:
        query: the queries, multiplied by the projection of latents to keys: ``[rows, heads, rank]`` in fp32, bf16 or
            fp16.
        rotated: the rotated parts of the queries, ``[rows, heads, rotated]``.
        latent: ``[rows, keys, rank]``. Latents and shared parts may be views of larger tensors; they are not copied.
        shared: the rotated part of each key, ``[rows, keys, rotated]``.
        ranges: as for ``decode_attention``.
        parts: how many parts the keys are divided into, at most 128; None chooses by shapes and multiprocessors.

    Returns: for every head the weighted sum of the latents, ``[rows, heads, rank]`` in the inputs' dtype.
    """
    query, rotated, latent, shared = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, rotated, latent, shared)
    )
    (rows, heads, rank), (_, keys, width) = query.shape, shared.shape
    columns, width_columns, groups = padded(rank), padded(width), -(-heads // _MEMBERS)
    block = keys_at_once(query, _MEMBERS, columns + width_columns, 0)
    if parts is None:
        parts = usual_parts(rows * groups, -(-keys // block), _PROGRAMS, query.device)
    ranges = ranges.expand(rows, 2)
    maxima, sums = query.new_empty(2, rows, heads, parts, dtype=torch.float32)
    partial = query.new_empty(rows, heads, parts, rank, dtype=torch.float32)
    out = query.new_empty(rows, heads, rank)
    strides = (*query.stride()[:2], *rotated.stride()[:2], *latent.stride()[:2], *shared.stride()[:2], ranges.stride(0))
    factor = scale * math.log2(math.e)  # the kernel computes powers of 2
    given: tuple[Any, ...] = (query, rotated, latent, shared, ranges, maxima, sums, partial, *strides, heads, factor)
    sizes = {"RANK": rank, "COLUMNS": columns, "WIDTH": width, "WIDTH_COLUMNS": width_columns}
    blocks = {"MEMBERS": _MEMBERS, "KEYS": block, "num_stages": 2}  # a block is loaded while another one is computed
    with torch.cuda.device_of(query):
        _latents_kernel[(rows * groups, parts)](*given, **sizes, **blocks)
    combine(maxima, sums, partial, out)
    return out


@latent_attention.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.shape)


@triton.jit
def _latents_kernel(
    query, rotated, latent, shared, ranges, maxima, sums, partial,
    query_row, query_head, rotated_row, rotated_head, latent_row, latent_token, shared_row, shared_token, range_row,
    heads, factor,
    MEMBERS: tl.constexpr, KEYS: tl.constexpr,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_COLUMNS: tl.constexpr,
):  # fmt: skip
    group, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    groups = tl.cdiv(heads, MEMBERS)
    row = (group // groups).to(tl.int64)
    head = (group % groups) * MEMBERS + tl.arange(0, MEMBERS)
    start, end = keys_of_part(ranges + row * range_row, part, parts, KEYS)

    column, width = tl.arange(0, COLUMNS), tl.arange(0, WIDTH_COLUMNS)
    known = (head < heads)[:, None]
    at_query = query + row * query_row + head[:, None] * query_head + column
    at_rotated = rotated + row * rotated_row + head[:, None] * rotated_head + width
    q = tl.load(at_query, mask=known & (column < RANK), other=0.0)
    turned = tl.load(at_rotated, mask=known & (width < WIDTH), other=0.0)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    found = tl.zeros([MEMBERS, COLUMNS], tl.float32)
    for at in range(start, end, KEYS):
        token = at + tl.arange(0, KEYS)
        inside = token < end
        places = token.to(tl.int64)[:, None]
        at_latent = latent + row * latent_row + places * latent_token + column
        at_shared = shared + row * shared_row + places * shared_token + width
        c = tl.load(at_latent, mask=inside[:, None] & (column < RANK), other=0.0)
        k = tl.load(at_shared, mask=inside[:, None] & (width < WIDTH), other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(turned, tl.trans(k), score, input_precision="ieee")
        score = tl.where(inside, score * factor, float("-inf"))
        top, total, found = add_keys(score, c, top, total, found)

    # A part without keys has the maximum -inf and the sum 0.
    to = (row * heads + head) * parts + part
    tl.store(maxima + to, top, mask=head < heads)
    tl.store(sums + to, total, mask=head < heads)
    tl.store(partial + to[:, None] * RANK + column, found, mask=known & (column < RANK))
