"""Routed experts over expert-parallel ranks, taken apart into route, dispatch, experts and combine (FarSkip §2.1).

DeepSpeed AutoEP owns the experts; here is only the order of its steps. The parts below are *blocking*: every
collective is awaited where it starts. They are the reference for any schedule that awaits later.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.module_inject.auto_ep_layer import (
    AutoEPMoELayer,
    RouterOutput,
    SplitPlan,
    _AllToAllV,
    combine_from_routed,
    compute_split_plan,
    permute_by_local_expert,
    unpermute_by_local_expert,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.build import arch_of, decoder_layers
from ..models.wiring import Blocks, Parts, Wiring, wire_layers


class Routing(NamedTuple):
    """Where each token of a rank goes: ``[tokens, top_k]`` scores, the expert-contiguous order, the split sizes."""

    scores: Tensor
    order: Tensor  # [tokens * top_k], indices into the flattened (token, choice) pairs
    plan: SplitPlan


def route(moe: Any, flat: Tensor) -> Routing:
    """Choose experts for ``flat [tokens, hidden]`` and exchange how many rows each rank sends to each."""
    scores, chosen, counts = RouterOutput(*moe.router(flat, moe.expert_bias))
    with torch.no_grad():
        moe.tokens_per_expert.add_(counts)
    order = torch.argsort(chosen.view(-1), stable=True)
    plan = compute_split_plan(chosen, moe.num_experts, moe.ep_size, moe.num_local_experts, moe.ep_group, counts)
    return Routing(scores, order, plan)


def dispatch(moe: Any, flat: Tensor, routing: Routing) -> Tensor:
    """Send each row of ``flat`` to its experts' ranks: ``[tokens, hidden] -> [received, hidden]``."""
    rows = flat[routing.order // moe.top_k]
    if moe.score_apply == "pre":
        rows = (rows.float() * routing.scores.reshape(-1, 1)[routing.order].float()).to(rows.dtype)
    return exchange(moe, rows, routing.plan.input_splits, routing.plan.output_splits)


def run_experts(moe: Any, received: Tensor, routing: Routing) -> Tensor:
    """This rank's experts on the rows it received: ``[received, hidden] -> [received, hidden]``, order kept."""
    rows, indices, counts, total = permute_by_local_expert(received, routing.plan.local_counts_by_source)
    return unpermute_by_local_expert(moe.experts(rows, counts), indices, total)


def combine(moe: Any, outputs: Tensor, routing: Routing, shape: tuple[int, int, int]) -> Tensor:
    """Send the outputs back and sum them per token, weighted: ``[received, hidden] -> [batch, seq, hidden]``."""
    rows = exchange(moe, outputs, routing.plan.output_splits, routing.plan.input_splits)
    return combine_from_routed(rows, routing.scores, routing.order, moe.top_k, moe.score_apply, moe.combine_impl, shape)


def exchange(moe: Any, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    """All-to-all over the expert-parallel group, awaited at once; differentiable."""
    if moe.ep_size == 1:
        return rows
    return _AllToAllV.apply(moe.ep_group, rows, sends, receives)


def blocking_parts(blocks: Blocks, layer: Any) -> Parts:
    """The parts of a decoder layer whose MoE block AutoEP replaced; a dense layer's are transformers' own."""
    moe = layer.get_submodule(blocks.mlp)

    def attn(x: Tensor, **kwargs: Any) -> Tensor:
        return layer.self_attn(hidden_states=x, **kwargs)[0]

    if not isinstance(moe, AutoEPMoELayer):
        return Parts(attn, moe, None)

    def routed(x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        flat = x.reshape(-1, hidden)
        routing = route(moe, flat)
        outputs = run_experts(moe, dispatch(moe, flat, routing), routing)
        return combine(moe, outputs, routing, (batch, seq, hidden))

    return Parts(attn, None if moe.shared_experts is None else partial(_shared, moe), routed)


def _shared(moe: Any, x: Tensor) -> Tensor:
    out = moe.shared_experts(x)
    if moe.shared_experts_gate is not None:
        out = torch.sigmoid(moe.shared_experts_gate(x)) * out
    return out


def wire_parallel(
    model: PreTrainedModel, wiring: Wiring, parts: Callable[[Blocks, nn.Module], Parts] = blocking_parts
) -> None:
    """Wire a model whose experts AutoEP has sharded; every layer is taken apart, so one set of parts serves all."""
    take_apart = partial(parts, arch_of(model.config).blocks)
    wire_layers(decoder_layers(model), wiring, take_apart, every=True)
