"""Routed experts over expert-parallel ranks, taken apart into choice, dispatch, experts and combine (FarSkip §2.1).

DeepSpeed AutoEP owns the experts; here is only the order of its steps. The parts below are *blocking*: every
collective is awaited where it starts. They are the reference for any schedule that awaits later.
"""

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
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.norms import fuse_norms
from fcsd.models.wiring import Blocks, Parts, Wiring, wire_layers


class Choice(NamedTuple):
    """The experts a rank's tokens chose: what the split sizes and the order of the rows follow from."""

    scores: Tensor  # [tokens, top_k]
    order: Tensor  # [tokens * top_k], indices into the flattened (token, choice) pairs, one expert after the other
    counts: Tensor  # [experts], rows per expert
    place: Tensor | None = None  # [tokens, top_k], the inverse of ``order``; None: torch moves the rows, no kernel


def choose(moe: Any, flat: Tensor, fused: bool = False) -> Choice:
    """Choose experts for ``flat [tokens, hidden]``.

    Args:
        fused: move the rows with ``fcsd.kernels.rows``.
    """
    scores, chosen, counts = RouterOutput(*moe.router(flat, moe.expert_bias))
    with torch.no_grad():
        moe.tokens_per_expert.add_(counts)
    order = torch.argsort(chosen.view(-1), stable=True)
    if fused:
        from fcsd.kernels.rows import places

        return Choice(scores, order, counts, places(order, moe.top_k))
    return Choice(scores, order, counts)


def exchange_counts(moe: Any, choice: Choice) -> SplitPlan:
    """Tell every rank how many rows it will get; the host waits for the answer."""
    # The first argument is read for its length alone, as long as the counts are given.
    return compute_split_plan(
        choice.order, moe.num_experts, moe.ep_size, moe.num_local_experts, moe.ep_group, choice.counts
    )


def pack(moe: Any, flat: Tensor, choice: Choice) -> Tensor:
    """The rows to send: ``[tokens, hidden] -> [tokens * top_k, hidden]``, one destination after the other."""
    if choice.place is not None:
        from fcsd.kernels.rows import spread

        return spread(flat, choice.scores if moe.score_apply == "pre" else None, choice.place)
    rows = flat[choice.order // moe.top_k]
    if moe.score_apply == "pre":
        rows = (rows.float() * choice.scores.reshape(-1, 1)[choice.order].float()).to(rows.dtype)
    return rows


def run_experts(moe: Any, received: Tensor, counts: Tensor) -> Tensor:
    """This rank's experts on the rows it received: ``[received, hidden] -> [received, hidden]``, order kept.

    Args:
        counts: ``[ranks, local experts]``, rows that came from each rank for each expert.
    """
    rows, indices, aligned, total = permute_by_local_expert(received, counts)
    del received  # not kept while the experts run
    return unpermute_by_local_expert(moe.experts(rows, aligned), indices, total)


def weigh(moe: Any, rows: Tensor, choice: Choice, shape: tuple[int, int, int]) -> Tensor:
    """Sum the outputs that came back per token, weighted: ``[tokens * top_k, hidden] -> [batch, seq, hidden]``."""
    if choice.place is not None:
        from fcsd.kernels.rows import collect

        return collect(rows, choice.scores if moe.score_apply == "post" else None, choice.place).view(shape)
    return combine_from_routed(rows, choice.scores, choice.order, moe.top_k, moe.score_apply, moe.combine_impl, shape)


def exchange(moe: Any, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
    """All-to-all over the expert-parallel group, awaited at once; differentiable."""
    if moe.ep_size == 1:
        return rows
    return _AllToAllV.apply(moe.ep_group, rows, sends, receives)


def blocking_parts(blocks: Blocks, layer: Any, fused: bool = False) -> Parts:
    """The parts of a decoder layer whose MoE block AutoEP replaced; a dense layer's are transformers' own.

    Args:
        fused: as ``choose``'s.
    """
    moe = layer.get_submodule(blocks.mlp)

    def attn(x: Tensor, **kwargs: Any) -> Tensor:
        return layer.self_attn(hidden_states=x, **kwargs)[0]

    if not isinstance(moe, AutoEPMoELayer):
        return Parts(attn, moe, None)

    def routed(x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        flat = x.reshape(-1, hidden)
        choice = choose(moe, flat, fused)
        plan = exchange_counts(moe, choice)
        received = exchange(moe, pack(moe, flat, choice), plan.input_splits, plan.output_splits)
        outputs = run_experts(moe, received, plan.local_counts_by_source)
        rows = exchange(moe, outputs, plan.output_splits, plan.input_splits)
        return weigh(moe, rows, choice, (batch, seq, hidden))

    return Parts(attn, None if moe.shared_experts is None else partial(_shared, moe), routed)


def _shared(moe: Any, x: Tensor) -> Tensor:
    out = moe.shared_experts(x)
    if moe.shared_experts_gate is not None:
        out = torch.sigmoid(moe.shared_experts_gate(x)) * out
    return out


def wire_parallel(model: PreTrainedModel, wiring: Wiring, fused: bool = False) -> None:
    """Wire a model whose experts AutoEP has sharded; every layer is taken apart, so one set of parts serves all.

    Args:
        fused: one kernel for each RMSNorm and each move of rows between tokens and experts, on CUDA; results differ
            in the last digit.
    """
    arch = arch_of(model.config)
    wire_layers(decoder_layers(model), wiring, partial(blocking_parts, arch.blocks, fused=fused), every=True)
    fuse_norms(model, arch, fused)
