"""The layout of the bundled teacher, its routers, and how its experts are computed.

Ten layers of DeepSeek-V2's architecture, the first dense, the others with 8 routed experts (2 used) and 2 shared ones.
"""

from typing import Any

import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

Routed = list[tuple[torch.Tensor, torch.Tensor]]  # of each router: logits [tokens, experts], chosen [tokens, used]


def config(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The teacher's config, with the vocabulary and the longest context of the tokenizer."""
    return DeepseekV2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=10,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        head_dim=16,
        v_head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=2,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )


def dense_experts(self: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every expert for every token ``[tokens, hidden]``, weighted by zero where not chosen.

    This computes the same function as routing. At this size it is faster, because it needs two matrix products and no
    gathering.
    """
    gates = torch.zeros(len(hidden), self.num_experts, device=hidden.device, dtype=weight.dtype)
    gates = gates.scatter(1, index, weight)
    gate, up = (
        functional.linear(hidden, self.gate_up_proj.flatten(0, 1)).unflatten(1, (self.num_experts, -1)).chunk(2, -1)
    )
    inner = self.act_fn(gate) * up * gates.unsqueeze(-1).to(up.dtype)
    return functional.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A model with random weights in fp32, whose experts are computed in the faster way."""
    return with_fast_experts(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def with_fast_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself. Its experts are dense products from now on."""
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model.set_experts_implementation("dense")
    return model


def routers(model: PreTrainedModel) -> list[Any]:
    """The routers of all layers that have one."""
    decoder: Any = model.get_decoder()
    return [layer.mlp.gate for layer in decoder.layers if hasattr(layer.mlp, "gate")]


def record_routing(model: PreTrainedModel) -> Routed:
    """A list that gets the logits and the choice of each router in a forward pass; the caller clears it before."""
    routed: Routed = []
    for router in routers(model):
        router.register_forward_hook(lambda _module, _inputs, out: routed.append((out[0], out[2])))
    return routed


def balance_loss(routed: Routed) -> torch.Tensor:
    """Mean over layers of experts * sum(share of tokens * mean probability); 1 when all experts are used equally."""
    losses = []
    for logits, index in routed:
        share = functional.one_hot(index, logits.shape[-1]).float().mean((0, 1))
        losses.append(logits.shape[-1] * (share * logits.float().softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()
