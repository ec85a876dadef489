"""Computes the routed experts of few tokens, as in a decoding step, by three Triton kernels that read each weight once.

With few tokens, the time is that of reading the weights of the chosen experts. Grouped matrix products read them more
slowly, and ordering the rows for them takes several kernels. Here a program computes some columns of one expert for
all tokens that chose it. It finds these tokens by itself, so that nothing is sorted, and a program whose expert nobody
chose ends at once. The first kernel computes ``silu(gate) * up``, the second one the outputs of each (token, k) pair,
and the third one sums the weighted outputs of each token.

Products and sums are fp32, and each of the three results is rounded once. There are no atomic additions, so the results
of two runs are equal. ``few_experts_reference`` computes the same in torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

MOST_PAIRS = 1024  # of tokens and experts; every program looks at all of them
_ROWS = 16  # tokens that a program computes at once, the fewest that ``tl.dot`` takes
# Within 8 % of the fastest of 20 launches on an H200, for 1 to 64 tokens of DeepSeek-V2-Lite and Qwen3-30B-A3B.
_COLUMNS = 64  # of a product, in each program
_DEPTH_BYTES = 128  # bytes of a row of weights that a program reads at once
_STAGES = 5  # blocks that are loaded at once
_SUMMED = 1024  # columns of a token that a program sums at once


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
        chosen: int64 ``[tokens, top_k]``, the experts of each token, with at most ``MOST_PAIRS`` elements. A number that
            no expert has stands for an expert on another rank, which adds nothing.
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
    _product(tokens, chosen, gate_up, inner, gated=True, repeats=top_k)
    _product(inner, chosen, down, outputs, gated=False, repeats=1)
    summed: dict[str, Any] = {"TOP_K": top_k, "BLOCK": min(_SUMMED, triton.next_power_of_2(hidden))}
    with torch.cuda.device_of(tokens):
        _sum_kernel[(count, triton.cdiv(hidden, summed["BLOCK"]))](
            outputs, chosen, weights, out, experts, hidden, **summed
        )
    return out


def _product(x: Tensor, chosen: Tensor, matrices: Tensor, out: Tensor, *, gated: bool, repeats: int) -> None:
    """Write each pair's product with the matrix of its expert into ``out [pairs, width]``.

    Args:
        x: ``[pairs / repeats, depth]``, each row for so many neighbouring pairs.
        matrices: ``[experts, width, depth]``; ``[experts, 2 * width, depth]`` if ``gated``, whose halves are multiplied
            as ``silu(gate) * up``.
    """
    pairs, width = out.shape
    sizes: dict[str, Any] = {
        "GATED": gated,
        "REPEATS": repeats,
        "PAIRS": max(16, triton.next_power_of_2(pairs)),
        "ROWS": _ROWS,
        "COLUMNS": _COLUMNS,
    }
    sizes |= {"DEPTH": _DEPTH_BYTES // x.element_size(), "num_stages": _STAGES}
    with torch.cuda.device_of(x):
        _product_kernel[(len(matrices), triton.cdiv(width, _COLUMNS))](
            x, chosen, matrices, out, pairs, x.shape[1], width, **sizes
        )


@few_experts.register_fake
def _(tokens: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape)


@triton.jit
def _product_kernel(
    rows, chosen, matrices, out, pairs, depth, width,
    GATED: tl.constexpr, REPEATS: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    own = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    number = tl.cumsum(own, 0)  # the first pair of this expert has number 1
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    HALVES: tl.constexpr = 2 if GATED else 1
    matrix = matrices + (expert.to(tl.int64) * HALVES * width + column[:, None]) * depth
    at = tl.arange(0, DEPTH)[None, :]
    for start in range(0, tl.sum(own, 0), ROWS):
        row = start + tl.arange(0, ROWS)
        here = (own[None, :] == 1) & (number[None, :] == row[:, None] + 1)
        mine = tl.sum(tl.where(here, pair[None, :], 0), 1)
        known = tl.sum(here.to(tl.int32), 1)[:, None] == 1
        source = rows + (mine // REPEATS).to(tl.int64)[:, None] * depth
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, depth, DEPTH):
            inside = first + at < depth
            mask = (column < width)[:, None] & inside
            x = tl.load(source + first + at, mask=known & inside, other=0.0)
            w = tl.load(matrix + first + at, mask=mask, other=0.0)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
            if GATED:
                w = tl.load(matrix + width * depth + first + at, mask=mask, other=0.0)
                up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
        if GATED:
            total = total * tl.sigmoid(total) * up
        to = out + mine.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=known & (column < width)[None, :])


@triton.jit
def _sum_kernel(outputs, chosen, weights, out, experts, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + k
        here = tl.load(chosen + pair) < experts
        x = tl.load(outputs + pair * width + column, mask=here & (column < width), other=0.0).to(tl.float32)
        total += x * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
