"""The layouts that a teacher can be trained in: their configs, their routers, and how their experts are computed.

- ``deepseek_v2``: the bundled teacher. Ten layers, the first dense, the others with 8 routed experts (2 used) and 2
  shared ones.
- ``qwen3_moe``: its sibling without shared experts. Ten layers with 16 routed experts, 4 used, so that a token passes
  through as many expert units as in the bundled teacher.
- ``llama``: a dense sibling. Sixteen layers, so that Ladder Table 4's 16 and 20 of 32 layers are 8 and 10.
- ``moe_64``: a larger teacher in the bundled one's architecture. Its hidden size is four times as large, and it has 64
  routed experts (6 used), as many as DeepSeek-V2-Lite; 129 M parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from fcsd.models.build import arch_of
from fcsd.models.fused.experts import fused_experts
from fcsd.models.fused.norms import fuse_norms

Routed = list[tuple[torch.Tensor, torch.Tensor]]  # of each router: logits [tokens, experts], chosen [tokens, used]
_SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
_DEEPSEEK_V2: dict[str, Any] = {
    "num_hidden_layers": 10,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
DENSE_UP_TO = 8  # experts for each one that is used: with more, computing all of them costs more than routing


def deepseek_v2(**shared: Any) -> PretrainedConfig:
    return DeepseekV2Config(
        **shared,
        **_SIZES,
        **_DEEPSEEK_V2,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        head_dim=16,
        v_head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )


def moe_64(**shared: Any) -> PretrainedConfig:
    return DeepseekV2Config(
        **shared,
        **_DEEPSEEK_V2,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        head_dim=32,
        v_head_dim=64,
        intermediate_size=1536,
        moe_intermediate_size=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
    )


def qwen3_moe(**shared: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(
        **shared,
        **_SIZES,
        num_hidden_layers=10,
        head_dim=32,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )


def llama(**shared: Any) -> PretrainedConfig:
    return LlamaConfig(**shared, **_SIZES, num_hidden_layers=16, head_dim=32, intermediate_size=384)


LAYOUTS: dict[str, Callable[..., PretrainedConfig]] = {
    "deepseek_v2": deepseek_v2,
    "qwen3_moe": qwen3_moe,
    "llama": llama,
    "moe_64": moe_64,
}


def config(layout: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The config of a layout, with the vocabulary and the longest context of the tokenizer."""
    return LAYOUTS[layout](
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
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


def routed_experts(self: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The chosen experts of every token ``[tokens, hidden]``, on a GPU with fcsd's kernels around grouped products.

    Autocast leaves grouped products alone, so the weights are cast here.
    """
    if not hidden.is_cuda:
        return grouped_mm_experts_forward(self, hidden, index, weight)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
    gate_up, down = self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
    return fused_experts(hidden.to(dtype), index, weight, gate_up, down)


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A model with random weights in fp32, whose experts are computed in the faster way."""
    return with_fast_experts(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def with_fast_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself. Its experts, if it has any, are dense products from now on, or routed if they are many.

    A model with routed experts is not compiled, so kernels compute its norms.
    """
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    ALL_EXPERTS_FUNCTIONS.register("routed", routed_experts)
    if gates := routers(model):
        few = gates[0].weight.shape[0] <= DENSE_UP_TO * model.config.num_experts_per_tok
        model.set_experts_implementation("dense" if few else "routed")
        if not few:
            fuse_norms(model, arch_of(model.config))
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
    """Mean over layers of experts * sum(share of tokens * mean probability); 1 when all experts are used equally.

    It is 0 for a model without routers.
    """
    losses = []
    for logits, index in routed:
        share = functional.one_hot(index, logits.shape[-1]).float().mean((0, 1))
        losses.append(logits.shape[-1] * (share * logits.float().softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean() if losses else torch.zeros(())
