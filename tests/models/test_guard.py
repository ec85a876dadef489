"""No row is silently wrong: its contracts hold with every field of the config that its code reads off its default.

Tiny models of ``tiny.py`` differ from the defaults in sizes only. A family whose code has a residual multiplier, a
scaled embedding or an optional bias would pass every test with them, and compute something else for a published model
that sets the field. Here the source of transformers' classes says which fields there are.
"""

import ast
import inspect
import re
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import literal
import pytest
import tiny
import torch
import transformers
from kernel_device import DEVICE
from representatives import representatives
from torch import Tensor

from fcsd.distill.loss.losses import logits_of
from fcsd.distill.teacher.targets import final_hidden, output_head
from fcsd.engine.logprobs import head_logits
from fcsd.errors import ConfigError
from fcsd.kernels.packed_attention import document_borders
from fcsd.models import archs
from fcsd.models.archs import ARCHS
from fcsd.models.build import (
    arch_of,
    causal_lm_class,
    decoder_layers,
    decoder_of,
    logits_cap,
    logits_factor,
    unwired,
    wire,
)
from fcsd.models.fused import fuse_norms, fuse_parts
from fcsd.models.wiring import Blocks, WiredLayer, Wiring

ALL = (0, 1, 2, 3)
# Fields of any family, for the configs that have them. No value is the default of a family.
MOVED: dict[str, Any] = dict(
    vocab_size=tiny.VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=96,
    initializer_range=0.15,
    rms_norm_eps=3e-2,
    norm_eps=3e-2,
    norm_epsilon=3e-2,
    layer_norm_eps=3e-2,
    attention_dropout=0.25,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.34},
    sliding_window=5,
    layer_types=["full_attention", "sliding_attention"] * 2,
)
FLIPPED = ("attention_bias", "mlp_bias", "use_bias", "use_sliding_window")
_EXPERTS = dict(
    moe_intermediate_size=24,
    num_experts=6,
    num_local_experts=6,
    num_experts_per_tok=3,
    n_routed_experts=6,
    n_shared_experts=3,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.7,
)
_SPARSE_FIRST = dict(mlp_layer_types=["sparse", "dense", "sparse", "sparse"])
_LINEAR_SECOND = ["full_attention", "linear_attention"] * 2
_INDEXER = dict(index_topk=3, index_head_dim=16, index_n_heads=16, layer_types=None)
_LATENT = dict(
    _EXPERTS,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    head_dim=8,
    v_head_dim=10,
)
_GROUPS = dict(n_group=3, topk_group=2, norm_topk_prob=False, mlp_layer_types=["dense", "dense", "sparse", "sparse"])
_YARN = dict(
    rope_type="yarn",
    rope_theta=50.0,
    factor=3.0,
    original_max_position_embeddings=7,
    beta_fast=16.0,
    beta_slow=2.0,
    mscale=1.3,
    mscale_all_dim=0.8,
    llama_4_scaling_beta=0.4,
)
_ROPE = dict(rope_type="default", rope_theta=50.0)  # for classes that fail if a part of a head is not rotated
_ROPES = dict(full_attention=_ROPE, sliding_attention=_ROPE)
_LINEAR = dict(
    layer_types=_LINEAR_SECOND,
    linear_num_value_heads=6,
    linear_num_key_heads=3,
    linear_key_head_dim=8,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=3,
)
_GATED_DELTA = dict(_EXPERTS, **_LINEAR, num_key_value_heads=1, shared_expert_intermediate_size=40)
_CONVOLVED = dict(conv_bias=True, conv_L_cache=4, layer_types=["full_attention", "conv"] * 2, tie_word_embeddings=False)
_MROPE = {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
_GLM_MROPE = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1]}
_GRANITE = dict(residual_multiplier=0.6, embedding_multiplier=3.0, attention_multiplier=0.4, logits_scaling=1.5)
_GEMMA3_TEXT = dict(
    pad_token_id=3,
    query_pre_attn_scalar=9,
    final_logit_softcapping=3.0,
    attn_logit_softcapping=2.0,
    num_key_value_heads=1,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
)
_GEMMA4 = dict(
    _EXPERTS,
    enable_moe_block=True,
    top_k_experts=3,
    pad_token_id=3,
    final_logit_softcapping=3.0,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=tiny.VOCAB,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    layer_types=["sliding_attention", "full_attention"] * 2,
    per_layer_config={1: {"head_dim": 16, "num_key_value_heads": 1}, 3: {"head_dim": 16, "num_key_value_heads": 1}},
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
)
_QWEN2_VL = dict(rope_parameters={"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 1, 1]})
_QWEN3_5 = dict(_GATED_DELTA, rope_parameters={**_MROPE, "partial_rotary_factor": 0.5})
_LFM2 = dict(
    _CONVOLVED, pad_token_id=2, block_multiple_of=8, block_ffn_dim_multiplier=1.4, block_auto_adjust_ff_dim=False
)
_GLM4V = dict(num_key_value_heads=1, rope_parameters=_GLM_MROPE)
_MAMBA = dict(mamba_d_state=6, mamba_d_conv=3, mamba_expand=3, mamba_conv_bias=False, mamba_proj_bias=True)
# What moves the fields that a family has alone, or that would not be moved by the values above.
OWN: dict[str, dict[str, Any]] = {
    "ministral3": dict(rope_parameters=_YARN),
    "seed_oss": dict(attention_out_bias=True, residual_dropout=0.3),
    "mistral3": dict(rope_parameters=_YARN),
    "ernie4_5": dict(num_key_value_heads=1, pad_token_id=2),
    "gemma": dict(pad_token_id=2),
    "glm": dict(num_key_value_heads=1),
    "phi3": dict(resid_pdrop=0.3, original_max_position_embeddings=48),
    "minimax_m2": dict(_EXPERTS, router_jitter_noise=0.1),
    "mimo_v2_flash": dict(
        {**_EXPERTS, "n_group": 3, "topk_group": 2},
        num_key_value_heads=1,
        v_head_dim=10,
        norm_topk_prob=False,
        attention_value_scale=0.6,
        **_SPARSE_FIRST,
        rope_parameters={kind: dict(rope, partial_rotary_factor=0.5) for kind, rope in _ROPES.items()},
    ),
    "mellum": dict(_EXPERTS, norm_topk_prob=False, **_SPARSE_FIRST, rope_parameters=_ROPES),
    "glm4_moe_lite": dict(_LATENT, **_GROUPS, rope_interleave=False, rope_parameters=_ROPE),
    "dots1": {**_EXPERTS, "norm_topk_prob": True, "n_group": 3, "topk_group": 2},
    "ernie4_5_moe": dict(
        pad_token_id=2,
        moe_intermediate_size=24,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=3,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        moe_norm_min=0.9,
    ),
    "exaone_moe": dict(_EXPERTS, **_GROUPS, pad_token_id=2, num_shared_experts=2, sliding_window_pattern=2),
    "solar_open": dict(_EXPERTS, **_GROUPS, rope_parameters=_ROPE),
    "deepseek_v32": dict({**_LATENT, **_GROUPS}, **_INDEXER),
    "qwen3_moe": dict(_EXPERTS, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[1]),
    "qwen2_moe": dict(
        _EXPERTS,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        qkv_bias=False,
    ),
    "mixtral": dict(_EXPERTS, router_jitter_noise=0.1),
    "olmoe": dict(_EXPERTS, norm_topk_prob=True, clip_qkv=0.5),
    "glm4_moe": dict(
        _EXPERTS, use_qk_norm=True, norm_topk_prob=False, first_k_dense_replace=2, topk_group=2, n_group=3
    ),
    "deepseek_v2": _LATENT,
    "deepseek_v3": dict(_LATENT, rope_interleave=False, norm_topk_prob=False),
    "gpt_oss": dict(_EXPERTS, swiglu_limit=0.5, swiglu_alpha=1.2),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": dict(rope_parameters=_MROPE),
    "qwen3_vl_moe": dict(
        _EXPERTS, rope_parameters=_MROPE, decoder_sparse_step=2, mlp_only_layers=[1], sliding_window=None
    ),
    "qwen3_next": dict(_GATED_DELTA, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[1]),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "llama4_text": dict(
        _EXPERTS,
        layer_types=None,
        intermediate_size_mlp=40,
        attn_temperature_tuning=False,
        attn_scale=0.3,
        floor_scale=4,
        use_qk_norm=False,
        attention_chunk_size=5,
        no_rope_layer_interval=2,
        interleave_moe_layer_step=2,
    ),
    "flex_olmo": dict(_EXPERTS, norm_topk_prob=True),
    "exaone4": dict(sliding_window_pattern=3),
    "gemma2": dict(pad_token_id=3, query_pre_attn_scalar=9, final_logit_softcapping=3.0, attn_logit_softcapping=2.0),
    "gemma3_text": _GEMMA3_TEXT,
    "gemma3": _GEMMA3_TEXT,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "granite": _GRANITE,
    "granitemoe": dict(_EXPERTS, **_GRANITE),
    "hyperclovax": dict(_GRANITE, use_post_norm=False),
    "minicpm3": dict(_LATENT, scale_depth=0.9, scale_emb=3, dim_model_base=20),
    "glm4": dict(attention_bias=False, num_key_value_heads=1),
    "afmoe": dict(
        _EXPERTS,
        num_shared_experts=3,
        num_dense_layers=2,
        route_scale=1.7,
        mup_enabled=True,
        global_attn_every_n_layers=2,
    ),
    "hy_v3": dict(
        _EXPERTS, num_shared_experts=2, router_scaling_factor=1.7, enable_moe_fp32_combine=False, **_SPARSE_FIRST
    ),
    "laguna": dict(
        _EXPERTS,
        shared_expert_intermediate_size=40,
        rope_parameters=_ROPES,
        gating="per-element",
        num_attention_heads_per_layer=[4, 2, 6, 4],
        **_SPARSE_FIRST,
        moe_routed_scaling_factor=1.7,
        moe_router_logit_softcapping=0.9,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": dict(
        _EXPERTS, **_CONVOLVED, pad_token_id=2, num_dense_layers=1, use_expert_bias=False, norm_topk_prob=False
    ),
    "kimi_linear": dict(
        _LATENT,
        n_group=3,
        topk_group=2,
        norm_topk_prob=False,
        linear_head_dim=8,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
        layer_types=_LINEAR_SECOND,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    ),
    "phimoe": dict(_EXPERTS, num_experts_per_tok=2, router_jitter_noise=0.1, input_jitter_noise=0.1, lm_head_bias=True),
    "granitemoehybrid": dict(
        _EXPERTS,
        **_MAMBA,
        **_GRANITE,
        shared_intermediate_size=40,
        position_embedding_type="rope",
        layer_types=_LINEAR_SECOND,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_chunk_size=4,
    ),
    "jamba": dict(
        _EXPERTS,
        **_MAMBA,
        pad_token_id=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=3,
        expert_layer_offset=0,
        mamba_dt_rank=5,
        use_mamba_kernels=False,
        use_mambapy=True,
        use_associative_scan=False,
    ),
    "glm_moe_dsa": dict({**_LATENT, **_GROUPS}, **_INDEXER, indexer_types=["full", "full", "shared", "shared"]),
    "mistral4": dict(
        {**_LATENT, "n_group": 3, "topk_group": 2, "head_dim": 20},
        rope_interleave=False,
        norm_topk_prob=False,
        rope_parameters=_YARN,
    ),
    "kimi_k25": dict(_LATENT, rope_interleave=False, norm_topk_prob=False),
    "glm4v": _GLM4V,
    "glm4v_moe": dict(
        _EXPERTS, norm_topk_prob=False, first_k_dense_replace=2, topk_group=2, n_group=3, rope_parameters=_GLM_MROPE
    ),
}
# Fields that the source reads and that no row moves, and why.
EXEMPT = {
    "output_router_logits": "only adds an output beside the logits",
    "router_aux_loss_coef": "weighs a loss that is off",
    "use_bidirectional_attention": "makes an encoder, which has no cached steps",
}
# Fields of a family that have one value here. transformers refuses another one, or computes it in one way with a cache
# and in another way without.
FIXED = {
    "phimoe": {"num_experts_per_tok"},  # its router makes two choices
    "step3p5": {"gating", "hidden_act"},  # of the class, whatever a config says
    "granitemoehybrid": {"time_step_limit"},  # transformers' own steps with a cache leave it out
}


# Other values of the fields that are words.
WORDS = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "relu"),
    "mamba_hidden_act": "gelu",
    "topk_method": "group_limited_greedy",
}


def guarded_config(arch: str, **words: str) -> Any:
    """The config of a row, with ``words``. Fields that the family does not have are left out."""
    row = ARCHS[arch]
    whole = getattr(transformers, row.config)
    default = whole() if row.text_config is None else default_text(arch)
    default.allow_global_per_layer_attribute_access = True  # of fields whose values differ from layer to layer
    flipped = {name: not getattr(default, name) for name in FLIPPED if hasattr(default, name)}
    own = {**MOVED, **flipped, **OWN.get(arch, {})}
    derived = {name for name in own if getattr(getattr(type(default), name, None), "fset", True) is None}
    moved = deepcopy({name: value for name, value in own.items() if hasattr(default, name) and name not in derived})
    moved["tie_word_embeddings"] = not getattr(whole(), "tie_word_embeddings", False)
    if row.text_config is None:
        return whole(**moved, **words)
    others = {name: value for name, value in tiny.CONFIGS[arch][1].items() if name != row.text_config}
    text = {"model_type": default.model_type, **moved, **words}
    return whole(**others, **{row.text_config: text}, tie_word_embeddings=moved["tie_word_embeddings"])


def default_text(arch: str) -> Any:
    """The default config of the language model inside a multimodal type, of the kind that the tiny model has."""
    row, own = ARCHS[arch], tiny.CONFIGS[arch][1]
    default = getattr(getattr(transformers, row.config)(), row.text_config or "")
    kind = own[row.text_config].get("model_type", default.model_type)
    return default if kind == default.model_type else transformers.AutoConfig.for_model(kind)


def guarded_model(arch: str, **words: str) -> Any:
    """A random model of the row whose norms are not one and whose biases are not zero, in eval mode."""
    torch.manual_seed(0)
    config = guarded_config(arch, **words)
    model = causal_lm_class(config)._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        biases = [tensor for name, tensor in model.named_buffers() if name.endswith("bias")]
        for tensor in (*model.parameters(), *biases):
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model


def fields_read(model: torch.nn.Module) -> set[str]:
    """The attributes of a config that the classes of a transformers model name, those of their parents included."""
    found = set()
    for cls in {base for module in model.modules() for base in type(module).__mro__}:
        if cls.__module__.startswith("transformers.models."):
            found |= fields_of_classes(cls.__module__).get(cls.__qualname__, set())
    return found


@cache
def fields_of_classes(module: str) -> dict[str, set[str]]:
    """The attributes of a config that the classes of a module name, by class."""
    source = inspect.getsource(sys.modules[module])
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found[node.name] = set(re.findall(r"\bconfig\.([a-z]\w*)", text))
            found[node.name] |= set(re.findall(r"\b[gs]etattr\((?:self\.)?config, \"([a-z]\w*)\"", text))
    return found


def not_moved(config: Any, read: set[str]) -> set[str]:
    """Those of the fields that are numbers, booleans, tables or None, and as the class has them by default."""
    whole, row = type(config)(), arch_of(config)
    default = whole if row.text_config is None else default_text(row.model_type)
    config = config.get_text_config()
    fixed = EXEMPT.keys() | FIXED.get(config.model_type, set())
    config.allow_global_per_layer_attribute_access = default.allow_global_per_layer_attribute_access = True
    values = {name: getattr(config, name, "") for name in read - fixed}
    values = {name: value for name, value in values.items() if not isinstance(value, str) and not callable(value)}
    return {name for name, value in values.items() if getattr(default, name, "") == value}


def outputs(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits and all gradients, of one step with dropout."""
    model.train().zero_grad()
    torch.manual_seed(3)
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def off_is_off(model: Any) -> bool:
    """Whether a model is transformers' to the bit with every layer taken apart, and then with none converted."""
    ids = tiny.tokens()
    for parameter in model.parameters():  # gradients exist everywhere, so that none can be skipped
        parameter.grad = torch.zeros_like(parameter)
    before, equal = outputs(model, ids), []
    for wiring in (Wiring("standard", ALL), Wiring("farskip", ())):
        wire(model, wiring)
        assert {isinstance(layer, WiredLayer) for layer in decoder_layers(model)} == {bool(wiring.layers)}
        after = outputs(model, ids)
        equal += [len(before) == len(after), *map(torch.equal, before, after)]
    model.eval()
    return all(equal)


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_every_field_that_the_code_reads_is_moved(arch: str) -> None:
    model = guarded_model(arch)
    read = fields_read(decoder_of(model))
    assert {"hidden_size", "num_attention_heads"} < read
    assert not_moved(model.config, read) == set()


@pytest.mark.parametrize("arch", representatives("layer", "moe"))
def test_off_is_off(arch: str) -> None:
    assert off_is_off(guarded_model(arch))


@pytest.mark.parametrize("arch", representatives("norm", "mlp", "moe", "rotary"))
@pytest.mark.skipif(DEVICE != "cpu", reason="dropout draws other numbers on a GPU")
def test_kernels_compute_the_same(arch: str) -> None:
    """With dropout, which a kernel could leave out."""
    kernels_compute_the_same(guarded_model(arch), arch)


def kernels_compute_the_same(model: Any, arch: str) -> None:
    ids = tiny.tokens(batch=1, length=2)  # the interpreter runs one program after the other for each token
    plain = outputs(model, ids)
    fuse_parts(model, arch_of(model.config), True)
    fused = outputs(model, ids)
    assert len(fused) == len(plain)
    for found, own in zip(fused, plain, strict=True):
        assert (found - own).norm() <= 1e-4 * own.norm() + 3e-6  # a key bias without positions has no gradient


@pytest.mark.parametrize("arch", representatives("layer", "moe"))
@pytest.mark.parametrize("name", ["farskip", "ladder", "parallel"])
def test_on_is_the_table_cached_or_not_and_gradients_flow(arch: str, name: str) -> None:
    model, ids = guarded_model(arch), tiny.tokens(length=12)
    # Biases of routers, and what chooses the keys that DeepSeek-V3.2 reads, have no gradient in transformers either.
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad or ".indexer." in name}
    *streams, logits = literal.evaluate(model, ids, name, "full", set(ALL))
    wire(model, Wiring(name, ALL))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
        step = model(ids[:, :8], use_cache=True)
        pieces = [step.logits]
        for i in range(8, 12):
            step = model(ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
            pieces.append(step.logits)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-4)
    for mine, true in zip(out.hidden_states[:-1], streams[:-1], strict=True):  # the last one is normed
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(pieces, dim=1), out.logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wire(model, unwired())(ids).logits, out.logits, atol=1e-2), "the wiring changes nothing"
    wire(model, Wiring(name, ALL))
    model(ids, labels=ids, use_cache=False).loss.backward()
    read = {*decoder_of(model).parameters(), *model.lm_head.parameters()}  # a vision tower reads no tokens
    without = {name for name, p in model.named_parameters() if p in read and (p.grad is None or not p.grad.any())}
    assert without == frozen


@pytest.mark.parametrize("arch", representatives("attention"))
def test_packed_documents_are_separate_ones(arch: str) -> None:
    """Also where a window, a chunk or a scale by positions would reach across their border."""
    model, ids = guarded_model(arch), tiny.tokens(batch=1, length=16)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    for wiring in (unwired(), Wiring("farskip", ALL)):
        wire(model, wiring)
        with torch.no_grad():
            rows = {"input_ids": ids, "position_ids": positions, "borders": document_borders(positions)}
            packed = final_hidden(model, rows)
            alone = [decoder_of(model)(part, use_cache=False).last_hidden_state for part in ids.split((7, 9), dim=1)]
        expected = torch.cat(alone, dim=1) * logits_factor(model.config)
        torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("arch", "text"), tiny.OTHER_TEXTS)
@pytest.mark.skipif(DEVICE != "cpu", reason="dropout draws other numbers on a GPU")
def test_another_text_inside_a_wrapper(arch: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.CONFIGS, arch, tiny.with_inside(f"{arch}+{text}"))
    monkeypatch.setitem(OWN, arch, OWN.get(text, {}))
    assert guarded_config(arch).text_config.model_type == text
    for check in (test_every_field_that_the_code_reads_is_moved, test_off_is_off, test_kernels_compute_the_same):
        check(arch)
    for check in (test_packed_documents_are_separate_ones, test_other_words_compute_the_same):
        check(arch)
    test_scores_and_losses_see_the_logits_of_the_model(arch)
    for name in ("farskip", "ladder", "parallel"):
        test_on_is_the_table_cached_or_not_and_gradients_flow(arch, name)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize(
    ("arch", "field"),
    [
        ("ernie4_5_moe", "moe_num_shared_experts"),  # with none, the block has no module for them
        ("deepseek_v3", "n_shared_experts"),  # with none, it has one of width 0
        ("exaone_moe", "num_shared_experts"),
    ],
)
def test_any_number_of_shared_experts(arch: str, field: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, arch, {**OWN[arch], field: count})
    off_is_off_and_farskip_is_the_table(arch)


def off_is_off_and_farskip_is_the_table(arch: str) -> None:
    model, ids = guarded_model(arch), tiny.tokens(length=12)
    assert off_is_off(model)
    expected = literal.evaluate(model, ids, "farskip", "full", set(ALL))[-1]
    wire(model, Wiring("farskip", ALL))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_without_experts_has_the_shared_ones_as_its_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Granite 4.0's dense models have."""
    monkeypatch.setitem(OWN, "granitemoehybrid", {**OWN["granitemoehybrid"], "num_local_experts": 0})
    off_is_off_and_farskip_is_the_table("granitemoehybrid")


@pytest.mark.parametrize(
    "without",
    [
        dict(enable_moe_block=False),
        dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0),
        dict(enable_moe_block=False, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
    ],
    ids=["experts", "features of tokens", "both"],
)
@pytest.mark.parametrize("arch", ["gemma4_text", "gemma4"])
def test_layers_without(arch: str, without: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The published models of one type differ in what their layers have: experts, and features of the tokens."""
    monkeypatch.setitem(OWN, arch, {**OWN[arch], **without})
    off_is_off_and_farskip_is_the_table(arch)


@torch.no_grad()
@pytest.mark.parametrize("name", ["farskip", "ladder"])
def test_tokens_are_cut_off_in_front_of_layers_that_read_the_keys_of_others(name: str) -> None:
    """transformers' loop does so where the last token's logits are all that is asked for."""
    model, ids = wire(guarded_model("gemma4_text"), Wiring(name, ALL)), tiny.tokens(length=12)
    seen: list[torch.Size] = []
    decoder_layers(model)[3].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"].shape), with_kwargs=True
    )
    whole, last = model(ids).logits, model(ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-4, atol=1e-4)
    assert [shape[1] for shape in seen] == [12, 1]


@torch.no_grad()
@pytest.mark.parametrize("arch", representatives("head", "norm"))
def test_scores_and_losses_see_the_logits_of_the_model(arch: str) -> None:
    """They compute them from final hidden states and the output head, a chunk at a time."""
    model, ids = guarded_model(arch), tiny.tokens().clamp(max=249)  # a text has no tokens that stand for images
    logits = model(ids, use_cache=False).logits
    scored = head_logits(model, decoder_of(model)(ids, use_cache=False).last_hidden_state)
    torch.testing.assert_close(scored, logits, rtol=1e-4, atol=1e-4)
    if model.lm_head.bias is not None:
        with pytest.raises(ConfigError, match="has a bias"):
            output_head(model)
        return
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = final_hidden(model, {"input_ids": ids, "position_ids": positions, "borders": document_borders(positions)})
    seen = logits_of(hidden.flatten(0, 1), output_head(model), logits_cap(model.config)).view_as(logits)
    torch.testing.assert_close(seen, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", representatives("layer", "mlp", "moe"))
@pytest.mark.skipif(DEVICE != "cpu", reason="dropout draws other numbers on a GPU")
def test_other_words_compute_the_same(arch: str) -> None:
    """A kernel knows one activation, and AutoEP and the parts one way of choosing experts."""
    row = ARCHS[arch]
    default = default_text(arch) if row.text_config else getattr(transformers, row.config)()
    default.allow_global_per_layer_attribute_access = True
    read = fields_read(guarded_model(arch))
    fixed = EXEMPT.keys() | FIXED.get(default.model_type, set())
    words = {name for name in read if isinstance(getattr(default, name, None), str)} - fixed
    assert words <= WORDS.keys()
    for name in words:
        model = guarded_model(arch, **{name: WORDS[name]})
        assert getattr(model.config.get_text_config(), name) != getattr(default, name) and off_is_off(model)
        kernels_compute_the_same(model, arch)


# Bare rows of families whose layers compute something else: a multiplier of residuals or of routed experts, further
# norms, dropouts, or shared experts before the router. Their configs are moved as far as the difference needs.
_FLAT = {"blocks": Blocks(shared="shared_experts", flattens=True)}
_LAGUNA = dict(_EXPERTS, rope_parameters=_ROPES, moe_routed_scaling_factor=2.5)
BARE: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("granite", "Granite", {}, {"residual_multiplier": 0.5}),
    ("glm4", "Glm4", {}, {}),
    ("laguna", "Laguna", _FLAT, _LAGUNA),
    ("gemma3_text", "Gemma3Text", {}, {"rope_parameters": _ROPES}),
    ("phi3", "Phi3", {}, OWN["phi3"]),
    ("ernie4_5_moe", "Ernie4_5_Moe", _FLAT, OWN["ernie4_5_moe"]),
]


@pytest.mark.parametrize(("arch", "stem", "row", "own"), BARE, ids=[bare[0] for bare in BARE])
def test_a_family_whose_layer_computes_something_else_is_found(
    arch: str, stem: str, row: dict[str, Any], own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHS, arch, archs._row(arch, stem, **row))  # pyright: ignore
    monkeypatch.setitem(OWN, arch, own)
    assert not off_is_off(guarded_model(arch))


@pytest.mark.parametrize(("norm_offset", "same"), [(1, True), (0, False)])
def test_a_norm_that_multiplies_by_one_plus_its_weight_is_found(
    norm_offset: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's: the kernel would multiply by the weight, and a row that names no epsilon has no kernel."""
    monkeypatch.setitem(ARCHS, "gemma", archs._row("gemma", "Gemma", norm_epsilon="eps", norm_offset=norm_offset))  # pyright: ignore
    model, ids = guarded_model("gemma"), tiny.tokens(batch=1, length=5)
    plain = outputs(model, ids)[0]
    fuse_norms(model, arch_of(model.config))
    assert torch.allclose(outputs(model, ids)[0], plain, atol=1e-4) == same


def test_a_cap_behind_the_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHS, "gemma2", replace(ARCHS["gemma2"], logits_cap=None))  # pyright: ignore
    with pytest.raises(AssertionError):
        test_scores_and_losses_see_the_logits_of_the_model("gemma2")


def test_a_field_that_nothing_moved_is_found() -> None:
    """Optional biases of llama, which the tiny models of other tests do not have."""
    model = tiny.model("llama")
    assert {"attention_bias", "mlp_bias", "rope_parameters", "rms_norm_eps"} <= not_moved(
        model.config, fields_read(model)
    )
