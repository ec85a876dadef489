"""Computes the attention of one query token of each row by Triton kernels that read only the keys in a range.

The keys of a row and key-value head are divided into parts of equal length. One program computes the attention of all
query heads that share the key-value head to one part, and a second kernel combines the parts (flash decoding:
https://pytorch.org/blog/flash-decoding/). A row with few keys therefore keeps as many programs busy as there are blocks
of keys, and a key outside of the range is never read. ``decode_attention_reference`` computes the same in torch.

The range of every row is on the device, and the number of parts depends on shapes only. A CUDA graph that holds the
kernels therefore stays right when the ranges change.

Scores and sums are fp32. The weights are rounded to the dtype of the values before the product with them.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fcsd.kernels.decode.shared_memory import shared_memory

_BLOCK_BYTES = 128  # bytes of one column of the keys that a program reads at once: 64 keys in bf16, 32 in fp32
_MOST_PARTS = 128  # a program of the second kernel holds all parts of a head in registers
_MOST_COLUMNS = 128  # of the values, in a program of the second kernel
_PROGRAMS = 4  # programs that a multiprocessor runs at once


def decode_attention_reference(query: Tensor, key: Tensor, value: Tensor, ranges: Tensor, scale: float) -> Tensor:
    """``decode_attention`` in torch, on any device and in any dtype."""
    places = torch.arange(key.shape[2], device=key.device)
    seen = (places >= ranges[:, :1]) & (places <= ranges[:, 1:])
    grouped = query.unflatten(1, (key.shape[1], -1))
    return scaled_dot_product_attention(grouped, key, value, seen[:, None, None], scale=scale).flatten(1, 2)


# An operator of torch is one node for torch.compile, which does not look inside.
@torch.library.custom_op("fcsd::decode_attention", mutates_args=())
def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, ranges: Tensor, scale: float, parts: int | None = None
) -> Tensor:
    """Attention of one query token of each row to the keys in the row's range. Not differentiable.

    Args:
        query: ``[rows, heads, head size]`` in fp32, bf16 or fp16.
        key: ``[rows, key-value heads, keys, head size]``, where each key-value head serves ``heads / key-value heads``
            neighbouring heads. Keys and values may be views of larger tensors; they are not copied.
        value: ``[rows, key-value heads, keys, value size]``.
        ranges: the first and the last key of every row, ``[rows, 2]`` int64 with ``0 <= first <= last < keys``. One row
            stands for all.
        parts: how many parts the keys are divided into, at most 128; None chooses by shapes and multiprocessors.

    Returns: ``[rows, heads, value size]`` in the inputs' dtype.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    (rows, heads, size), (_, shared, keys, value_size) = query.shape, value.shape
    pairs, group = rows * shared, heads // shared
    block = keys_at_once(query, padded(group), padded(size), padded(value_size))
    if parts is None:
        parts = usual_parts(pairs, -(-keys // block), _PROGRAMS, query.device)
    ranges = ranges.expand(rows, 2)
    maxima, sums = query.new_empty(2, rows, heads, parts, dtype=torch.float32)
    partial = query.new_empty(rows, heads, parts, value_size, dtype=torch.float32)
    out = query.new_empty(rows, heads, value_size)
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], ranges.stride(0))
    factor = scale * math.log2(math.e)  # the kernels compute powers of 2
    given: tuple[Any, ...] = (query, key, value, ranges, maxima, sums, partial, *strides, shared, factor)
    values: dict[str, Any] = {"VALUE_SIZE": value_size, "VALUE_COLUMNS": padded(value_size)}
    sizes = {"GROUP": group, "MEMBERS": padded(group), "SIZE": size, "COLUMNS": padded(size), **values}
    blocks = {"KEYS": block, "num_stages": 2}  # a block is loaded while the one before it is computed
    with torch.cuda.device_of(query):
        _parts_kernel[(pairs, parts)](*given, **sizes, **blocks)
    combine(maxima, sums, partial, out)
    return out


@decode_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ranges: Tensor, scale: float, parts: int | None = None) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """``decode_attention`` as an attention function of transformers.

    Args:
        query: ``[rows, heads, 1, head size]``.
        attention_mask: the ranges in the place of a mask, ``[rows, 1, 1, 2]`` or ``[1, 1, 1, 2]``.

    Returns: ``[rows, 1, heads, value size]``, and None for the weights.
    """
    return decode_attention(query[:, :, 0], key, value, attention_mask[:, 0, 0], options["scaling"])[:, None], None


def keys_at_once(query: Tensor, members: int, columns: int, others: int) -> int:
    """How many keys a program reads at once: 128 bytes of each column, or fewer if shared memory does not suffice.

    Args:
        members: how many heads a program computes.
        columns: how many numbers of a key it multiplies with the queries that it holds.
        others: how many other numbers it reads for each key.
    """
    keys, size = _BLOCK_BYTES // query.element_size(), query.element_size()
    room = shared_memory(query.device)
    while keys > 16 and (keys * (columns + others) + members * (columns + keys)) * size > room:
        keys //= 2
    return keys


def usual_parts(pairs: int, blocks: int, programs: int, device: torch.device) -> int:
    """As many parts as all multiprocessors compute at once, but no more than there are blocks of keys.

    Args:
        pairs: how many programs each part has.
        blocks: how many blocks of keys a row has.
        programs: how many programs a multiprocessor runs at once.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(programs * processors // pairs, blocks, _MOST_PARTS))


def combine(maxima: Tensor, sums: Tensor, partial: Tensor, out: Tensor) -> None:
    """Write the attention of each head, from that to each part of the keys, into ``out [rows, heads, value size]``.

    Args:
        maxima: the highest score of each part as a power of 2, ``[rows, heads, parts]`` in fp32; -inf without keys.
        sums: the sums of the weights relative to it, ``[rows, heads, parts]`` in fp32.
        partial: the sums of the weighted values, ``[rows, heads, parts, value size]`` in fp32.
    """
    (rows, heads, parts), value_size = sums.shape, out.shape[2]
    columns = min(padded(value_size), _MOST_COLUMNS)
    sizes: dict[str, Any] = {"PARTS": padded(parts), "VALUE_SIZE": value_size, "VALUE_COLUMNS": columns}
    with torch.cuda.device_of(out):
        _sum_kernel[(rows * heads, -(-value_size // columns))](maxima, sums, partial, out, parts, **sizes)


def padded(side: int) -> int:
    """The side of a matrix that ``tl.dot`` takes: a power of two, and at least 16."""
    return max(16, 1 << (side - 1).bit_length())


@triton.jit
def keys_of_part(range, part, parts, KEYS: tl.constexpr):
    """The first key of a part of a row's range, and the key behind its last one."""
    first, last = tl.load(range).to(tl.int32), tl.load(range + 1).to(tl.int32)
    length = tl.cdiv(tl.cdiv(last - first + 1, parts), KEYS) * KEYS
    start = first + part * length
    return start, tl.minimum(start + length, last + 1)


@triton.jit
def add_keys(score, value, top, total, found):
    """The highest score, the sum of weights and the weighted sum of values, each with another block of keys."""
    higher = tl.maximum(top, tl.max(score, 1))
    kept = tl.exp2(top - higher)
    weight = tl.exp2(score - higher[:, None])
    total = total * kept + tl.sum(weight, 1)
    found = found * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return higher, total, found


@triton.jit
def _parts_kernel(
    query, key, value, ranges, maxima, sums, partial,
    query_row, query_head, key_row, key_head, key_token, value_row, value_head, value_token, range_row,
    shared, factor,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, KEYS: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, head = (pair // shared).to(tl.int64), (pair % shared).to(tl.int64)
    start, end = keys_of_part(ranges + row * range_row, part, parts, KEYS)  # pyright: ignore[reportGeneralTypeIssues]

    member, column, value_column = tl.arange(0, MEMBERS), tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    heads = (head * GROUP + member)[:, None] * query_head
    known = (member < GROUP)[:, None]
    q = tl.load(query + row * query_row + heads + column, mask=known & (column < SIZE), other=0.0)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    found = tl.zeros([MEMBERS, VALUE_COLUMNS], tl.float32)
    for at in range(start, end, KEYS):
        token = at + tl.arange(0, KEYS)
        inside = token < end
        places = token.to(tl.int64)[:, None]
        k = tl.load(
            key + row * key_row + head * key_head + places * key_token + column,
            mask=inside[:, None] & (column < SIZE),
            other=0.0,
        )
        v = tl.load(
            value + row * value_row + head * value_head + places * value_token + value_column,
            mask=inside[:, None] & (value_column < VALUE_SIZE),
            other=0.0,
        )
        score = tl.where(inside, tl.dot(q, tl.trans(k), input_precision="ieee") * factor, float("-inf"))
        top, total, found = add_keys(score, v, top, total, found)  # pyright: ignore[reportGeneralTypeIssues]

    # A part without keys has the maximum -inf and the sum 0.
    to = (pair.to(tl.int64) * GROUP + member) * parts + part
    tl.store(maxima + to, top, mask=member < GROUP)
    tl.store(sums + to, total, mask=member < GROUP)
    tl.store(partial + to[:, None] * VALUE_SIZE + value_column, found, mask=known & (value_column < VALUE_SIZE))


@triton.jit
def _sum_kernel(
    maxima, sums, partial, out, parts, PARTS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_COLUMNS: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    part, value_column = tl.arange(0, PARTS), tl.program_id(1) * VALUE_COLUMNS + tl.arange(0, VALUE_COLUMNS)
    top = tl.load(maxima + head * parts + part, mask=part < parts, other=float("-inf"))
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + head * parts + part, mask=part < parts, other=0.0), 0)
    found = tl.load(
        partial + (head * parts + part)[:, None] * VALUE_SIZE + value_column,
        mask=(part < parts)[:, None] & (value_column < VALUE_SIZE),
        other=0.0,
    )
    found = tl.sum(found * weight[:, None], 0) / total
    tl.store(out + head * VALUE_SIZE + value_column, found.to(out.dtype.element_ty), mask=value_column < VALUE_SIZE)
