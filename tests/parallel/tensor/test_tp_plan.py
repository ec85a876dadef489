"""Every tensor of a decoder layer has a style: its row's, transformers', or that of norms and routers."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from transformers import PretrainedConfig

from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers
from fcsd.parallel.tensor.tp_plan import Shard, Sharding, TensorGroup, layer_sharding, own_range, tp_plan_of


def shardings(arch: str, **changes: Any) -> dict[str, Sharding]:
    """What a rank has of each tensor of the last layer of a tiny model."""
    with torch.device("meta"):
        model: Any = tiny.model(arch, **changes)
    plan = tp_plan_of(ARCHS[arch], model.config)
    return {
        name: layer_sharding(plan, name, tensor.ndim) for name, tensor in decoder_layers(model)[-1].state_dict().items()
    }


@pytest.mark.parametrize("arch", [arch for arch in tiny.CONFIGS if ARCHS[arch].no_tp is None])
def test_every_tensor_of_a_layer_has_a_style(arch: str) -> None:
    """Matrices are sharded, but for those of routers, of gates and of latents; nothing else is replicated."""
    found = shardings(arch)
    whole = {name for name, sharding in found.items() if sharding == "whole" and name.endswith(".weight")}
    blocks = ARCHS[arch].blocks
    replicated = (
        "norm",
        "post_norm1",
        "post_norm2",
        f"{blocks.mlp}.{blocks.router}",
        f"{blocks.mlp}.{blocks.shared_gate}",
        "_a_proj",
        "_with_mqa",
        "gate.wg",
        "router.gate",
        "norm.mlp.fc1",
        "norm.mlp.fc2",
    )
    whole = {name for name in whole if ".indexer." not in name}
    assert {name for name in whole if not name.removesuffix(".weight").endswith(replicated)} == set()
    assert found["self_attn.o_proj.weight"] == Shard(1)


def test_key_value_heads_biases_and_packed_blocks() -> None:
    dense = shardings("llama", attention_bias=True, mlp_bias=True)
    assert dense["self_attn.q_proj.weight"] == dense["self_attn.q_proj.bias"] == Shard(0)
    assert dense["self_attn.k_proj.weight"] == dense["self_attn.v_proj.bias"] == Shard(0, kv=True)
    assert dense["self_attn.o_proj.bias"] == dense["mlp.down_proj.bias"] == "first"
    moe = shardings("qwen2_moe")
    assert moe["mlp.experts.gate_up_proj"] == Shard(1, packed=2) and moe["mlp.experts.down_proj"] == Shard(2)
    assert moe["mlp.shared_expert.down_proj.weight"] == Shard(1)
    assert moe["mlp.gate.weight"] == moe["mlp.shared_expert_gate.weight"] == "whole"


@pytest.mark.parametrize(
    ("degree", "rank", "rows"), [(2, 1, [(4, 4), (10, 2), (14, 2)]), (4, 1, [(2, 2), (8, 2), (12, 2)])]
)
def test_heads_in_one_weight_are_divided_by_their_kinds(degree: int, rank: int, rows: list[tuple[int, int]]) -> None:
    """Four query heads of width 2, then two key heads and two value heads, which are repeated on four ranks."""
    sharding = shardings("phi3")["self_attn.qkv_proj.weight"]
    assert sharding == Shard(0, query_heads=4)
    assert own_range(sharding, 16, TensorGroup(None, degree, rank), kv_heads=2) == rows


def test_what_the_rows_add_to_the_plans_of_transformers() -> None:
    stored_transposed = shardings("llama4_text")
    assert stored_transposed["feed_forward.experts.gate_up_proj"] == Shard(2, packed=2)
    assert stored_transposed["feed_forward.experts.down_proj"] == Shard(1)
    biased = shardings("gpt_oss")
    assert biased["self_attn.sinks"] == Shard(0)
    assert biased["mlp.experts.gate_up_proj"] == Shard(2) and biased["mlp.experts.gate_up_proj_bias"] == Shard(1)
    assert biased["mlp.experts.down_proj"] == Shard(1) and biased["mlp.experts.down_proj_bias"] == "first"
    over_heads = shardings("olmoe")
    assert over_heads["self_attn.q_norm.weight"] == Shard(0)
    assert over_heads["self_attn.k_norm.weight"] == Shard(0, kv=True)
    latent = shardings("deepseek_v3")
    assert latent["self_attn.q_b_proj.weight"] == latent["self_attn.kv_b_proj.weight"] == Shard(0)
    assert latent["self_attn.q_a_proj.weight"] == latent["self_attn.kv_a_layernorm.weight"] == "whole"


@pytest.mark.parametrize(
    ("styles", "name", "message"),
    [
        ({}, "self_attn.qk_proj.weight", "how to shard self_attn.qk_proj.weight$"),
        ({"self_attn.k_proj": "colwise_gather_output"}, "self_attn.k_proj.weight", "as colwise_gather_output$"),
        ({"mlp.experts": "moe_tp_experts"}, "mlp.experts.up_proj", "as moe_tp_experts$"),
    ],
)
def test_a_tensor_without_a_style_is_refused(styles: dict[str, str], name: str, message: str) -> None:
    plan = {f"layers.*.{path}": style for path, style in styles.items()}
    config = type("Config", (PretrainedConfig,), {"base_model_tp_plan": plan, "num_attention_heads": 4})()
    with pytest.raises(BadInputError, match=message):
        layer_sharding(tp_plan_of(ARCHS["llama"], config), name, 2)
    row = replace(ARCHS["llama"], tp_plan={name: "colwise"})
    assert layer_sharding(tp_plan_of(row, config), name, 2) == Shard(0, kv=".k_proj" in name)


def test_usual_names_need_no_style_of_a_row_and_norms_over_heads_do() -> None:
    config: Any = type("Config", (PretrainedConfig,), {"base_model_tp_plan": None, "num_attention_heads": 4})()
    plan = tp_plan_of(ARCHS["llama"], config)
    assert layer_sharding(plan, "self_attn.k_proj.weight", 2) == Shard(0, kv=True)
    assert layer_sharding(plan, "mlp.shared_experts.down_proj.weight", 2) == Shard(1)
    assert layer_sharding(plan, "mlp.gate_up_proj.weight", 2) == Shard(0, packed=2)
    config = tiny.config("olmo2")
    with pytest.raises(BadInputError, match=r"as colwise_gather_output$"):
        layer_sharding(tp_plan_of(replace(ARCHS["olmo2"], norms_over_heads=()), config), "self_attn.q_proj.weight", 2)


def test_a_plan_in_config_json_is_not_read() -> None:
    config = tiny.config("llama", base_model_tp_plan={"layers.*.self_attn.q_proj": "replicated"})
    assert layer_sharding(tp_plan_of(ARCHS["llama"], config), "self_attn.q_proj.weight", 2) == Shard(0)
