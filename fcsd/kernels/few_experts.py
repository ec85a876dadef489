"""Computes the routed experts of few tokens, as in a decoding step, by Triton kernels that read each weight once.

With few tokens, the time is that of reading the weights of the chosen experts. Grouped matrix products read them more
slowly, and ordering the rows for them takes several kernels. Here the first kernel lists the (token, k) pairs of each
expert. A program of the second one computes some columns of ``silu(gate) * up`` for all pairs of one expert, and ends
at once if there are none. The third one computes the outputs of each pair in the same way, and the last one sums the
weighted outputs of each token.

Products and sums are fp32, and each of the three results is rounded once. There are no atomic additions, so the results
of two runs are equal. ``few_experts_reference`` computes the same in torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

# Pairs that a program computes at once: the fewest that ``tl.dot`` takes, or more for an expert that many tokens chose.
_FEW_ROWS, _MANY_ROWS = 16, 32
# Within 8 % of the fastest of 20 launches on an H200, for 1 to 64 tokens of DeepSeek-V2-Lite and Qwen3-30B-A3B.
_COLUMNS = 64  # of a product, in each program
_DEPTH_BYTES = 128  # bytes of a row of weights that a program reads at once
_STAGES = 5  # one more than the blocks that are loaded at once; fewer if shared memory does not suffice
_SUMMED = 1024  # columns of a token that a program sums at once
_HOPPER = 232448  # bytes of shared memory, for Triton's interpreter, which has no limit


def few_experts_reference(tokens: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``few_experts`` in torch, on any device and in any dtype; one expert after the other."""
    outputs = tokens.new_zeros(*chosen.shape, tokens.shape[1])
    for expert in range(len(gate_up)):
        token, k = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (tokens[token].float() @ gate_up[expert].float().T).chunk(2, dim=-1)
        inner = (functional.silu(gate) * up).to(tokens.dtype)
        outputs[token, k] = (inner.float() @ down[expert].float().T).to(tokens.dtype)
    return (outputs.float() * weights.float()[..., None]).sum(1).to(tokens.dtype)


# An operator of torch is one node for torch.compile, which does not look inside.
@torch.library.custom_op("fcsd::few_experts", mutates_args=())
def few_experts(tokens: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[tokens, hidden]`` to the same shape. Not differentiable.

    Args:
        tokens: fp32, bf16 or fp16.
        chosen: int64 ``[tokens, top_k]``, the different experts of each token. A number that no expert has stands for
            an expert on another rank, which adds nothing. One program holds all numbers, so there should be few.
        weights: ``[tokens, top_k]``, the weights of the experts.
        gate_up: ``[experts, 2 * inner, hidden]`` in the dtype of the tokens, gates first.
        down: ``[experts, hidden, inner]``, likewise.
    """
    tokens, chosen, weights = tokens.contiguous(), chosen.contiguous(), weights.contiguous()
    gate_up, down = gate_up.contiguous(), down.contiguous()
    (count, hidden), (experts, _, width), top_k = tokens.shape, down.shape, chosen.shape[1]
    pairs = chosen.numel()
    inner, outputs = tokens.new_empty(pairs, width), tokens.new_empty(pairs, hidden)
    out = torch.empty_like(tokens)
    counts = torch.empty(experts, dtype=torch.int32, device=tokens.device)
    pairs_of = torch.empty(experts, count, dtype=torch.int32, device=tokens.device)
    listed: dict[str, Any] = {"PAIRS": triton.next_power_of_2(pairs)}
    summed: dict[str, Any] = {"TOP_K": top_k, "BLOCK": min(_SUMMED, triton.next_power_of_2(hidden))}
    with torch.cuda.device_of(tokens):
        _list_kernel[(experts,)](chosen, counts, pairs_of, pairs, count, **listed)
        _product(tokens, counts, pairs_of, gate_up, inner, gated=True, repeats=top_k)
        _product(inner, counts, pairs_of, down, outputs, gated=False, repeats=1)
        _weighted_sum_kernel[(count, triton.cdiv(hidden, summed["BLOCK"]))](
            outputs, chosen, weights, out, experts, hidden, **summed
        )
    return out


def _product(
    x: Tensor, counts: Tensor, pairs_of: Tensor, matrices: Tensor, out: Tensor, *, gated: bool, repeats: int
) -> None:
    """Write each pair's product with the matrix of its expert into ``out [pairs, width]``.

    Args:
        x: ``[pairs / repeats, depth]``, each row for so many neighbouring pairs.
        counts: how many pairs each expert has, int32 ``[experts]``.
        pairs_of: their numbers, int32 ``[experts, tokens]``.
        matrices: ``[experts, width, depth]``; ``[experts, 2 * width, depth]`` if ``gated``, whose halves are multiplied
            as ``silu(gate) * up``.
    """
    (experts, tokens), width = pairs_of.shape, out.shape[1]
    many = _MANY_ROWS if tokens > _FEW_ROWS else _FEW_ROWS
    sizes: dict[str, Any] = {"GATED": gated, "REPEATS": repeats, "FEW": _FEW_ROWS, "MANY": many, "COLUMNS": _COLUMNS}
    loaded = (many + (2 if gated else 1) * _COLUMNS) * _DEPTH_BYTES  # bytes of a block
    sizes |= {
        "DEPTH": _DEPTH_BYTES // x.element_size(),
        "num_stages": min(_STAGES, 1 + shared_memory(x.device) // loaded),
    }
    _product_kernel[(experts, triton.cdiv(width, _COLUMNS))](
        x, counts, pairs_of, matrices, out, tokens, x.shape[1], width, **sizes
    )


@few_experts.register_fake
def _(tokens: Tensor, *others: Any) -> Tensor:
    return tokens.new_empty(tokens.shape)


@triton.jit
def _list_kernel(chosen, counts, pairs_of, pairs, tokens, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    own = tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert
    number = tl.cumsum(own.to(tl.int32), 0)  # the first pair of this expert has number 1
    tl.store(pairs_of + expert * tokens + number - 1, pair, mask=own)
    tl.store(counts + expert, tl.sum(own.to(tl.int32), 0))


@triton.jit
def _product_kernel(
    x, counts, pairs_of, matrices, out, tokens, depth, width,
    GATED: tl.constexpr, REPEATS: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    count = tl.load(counts + expert)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    HALVES: tl.constexpr = 2 if GATED else 1  # pyright: ignore[reportAssignmentType]
    matrix = matrices + (expert.to(tl.int64) * HALVES * width + column[:, None]) * depth
    own = pairs_of + expert * tokens
    if count > FEW:
        for start in range(0, count, MANY):
            _tile(x, own, matrix, out, start, count, depth, width, column, GATED, REPEATS, MANY, COLUMNS, DEPTH)
    elif count > 0:
        _tile(x, own, matrix, out, 0, count, depth, width, column, GATED, REPEATS, FEW, COLUMNS, DEPTH)


@triton.jit
def _tile(
    x, own, matrix, out, start, count, depth, width, column,
    GATED: tl.constexpr, REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = start + tl.arange(0, ROWS)
    pair = tl.load(own + row, mask=row < count, other=0).to(tl.int64)[:, None]
    known, wanted = (row < count)[:, None], column < width
    source = x + pair // REPEATS * depth
    at = tl.arange(0, DEPTH)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, DEPTH):
        inside = first + at < depth
        values = tl.load(source + first + at, mask=known & inside, other=0.0)
        weights = tl.load(matrix + first + at, mask=wanted[:, None] & inside, other=0.0)
        total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
        if GATED:
            weights = tl.load(matrix + width * depth + first + at, mask=wanted[:, None] & inside, other=0.0)
            up = tl.dot(values, tl.trans(weights), up, input_precision="ieee")
    if GATED:
        total = total * tl.sigmoid(total) * up
    tl.store(out + pair * width + column[None, :], total.to(out.dtype.element_ty), mask=known & wanted[None, :])


@triton.jit
def _weighted_sum_kernel(outputs, chosen, weights, out, experts, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + k
        here = tl.load(chosen + pair) < experts
        x = tl.load(outputs + pair * width + column, mask=here & (column < width), other=0.0).to(tl.float32)
        total += x * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have: 99 KiB to 227 KiB on NVIDIA's GPUs, 64 KiB on an MI300X."""
    if device.type != "cuda":
        return _HOPPER
    properties: Any = torch.cuda.get_device_properties(device)
    # AMD's GPUs have one limit. On NVIDIA's, Triton asks for the higher one of two.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
