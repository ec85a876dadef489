"""Lets Triton kernels move the rows of routed experts that all are on one GPU, and compute the product inside them.

The grouped matrix products are those of transformers. Around them, transformers copies every row to its expert and back
by indexing, multiplies the outputs by the scores in a tensor of their own, and fills rows of absent experts. Its
backward pass sorts indices to add rows up. Here one kernel copies tokens to rows, one computes ``silu(gate) * up``, and
one sums each token's weighted rows. Products and sums are computed in fp32 and rounded once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from . import swap_classes

# Pairs of a token and an expert up to which ``few_experts`` computes.
_FEW = 1024


class FusedExperts(nn.Module):
    """Routed experts whose rows kernels move; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_experts(fused=False)`` restores
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, ``[tokens, hidden]`` to the same shape.

        ``top_k_index``, int64, and ``top_k_weights`` are ``[tokens, top_k]``.
        """
        # A plan counts what is allocated on the meta device, and would not see what this one operator allocates inside.
        if not torch.is_grad_enabled() and top_k_index.numel() <= _FEW and not hidden_states.is_meta:
            from fcsd.kernels.few_experts import few_experts  # Triton is imported only where its kernels run

            return few_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)
        # A compiler fuses transformers' own code, and only that knows of experts on other ranks.
        if torch.compiler.is_compiling() or getattr(self, "_is_expert_parallel", False):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return fused_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


def fused_experts(hidden: Tensor, chosen: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[tokens, hidden]`` to the same shape, on a GPU.

    Args:
        chosen: int64 ``[tokens, top_k]``, the experts of each token.
        scores: ``[tokens, top_k]``, their weights.
        gate_up: ``[experts, 2 * inner, hidden]``, gates first.
        down: ``[experts, hidden, inner]``.
    """
    from fcsd.kernels.gated import gated_silu_halves  # Triton is imported only where its kernels run
    from fcsd.kernels.rows import permute, row_numbers, unpermute

    expert_of_row, order = torch.sort(chosen.flatten())
    row_of = row_numbers(order, chosen.shape[1])
    # The first row behind those of each expert. The host does not wait for it.
    experts = torch.arange(len(gate_up), device=chosen.device)
    ends = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
    rows = permute(hidden, None, row_of)
    inner = gated_silu_halves(_grouped_product(rows, gate_up, ends))
    return unpermute(_grouped_product(inner, down, ends), scores, row_of)


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The product of each row with the transposed matrix of its expert, by the kernel that transformers uses.

    Args:
        rows: ``[rows, in]``, ordered by expert.
        weights: ``[experts, out, in]``.
        ends: int32 ``[experts]``, the first row behind those of each expert.
    """
    return moe._grouped_linear(rows, weights, ends)  # pyright: ignore[reportPrivateUsage]


def fuse_experts(model: nn.Module, fused: bool = True) -> None:
    """Let kernels move the rows of all routed experts that ``is_grouped`` describes, or restore transformers' code.

    The call can be repeated.
    """
    swap_classes(model, FusedExperts, is_grouped, fused)


def is_grouped(module: Any) -> bool:
    """Whether a module holds routed experts that transformers computes as ``FusedExperts`` does.

    These are gated MLPs with SiLU and without biases, computed by grouped products. Their weights are
    ``[experts, 2 * inner, hidden]``, gates first, and ``[experts, hidden, inner]``.
    """
    if getattr(type(module), "_apply_gate", None) is not moe._default_apply_gate:  # pyright: ignore[reportPrivateUsage]
        return False
    form = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return (
        all(getattr(module, name) == value for name, value in form.items())
        and module.config._experts_implementation == "grouped_mm"
        and isinstance(module.act_fn, SiLUActivation | nn.SiLU)
    )
