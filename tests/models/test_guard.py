"""No row is silently wrong: its contracts hold with every field of the config that its code reads off its default.

Tiny models of ``tiny.py`` differ from the defaults in sizes only. A family whose code has a residual multiplier, a
scaled embedding or an optional bias would pass every test with them, and compute something else for a published model
that sets the field. Here the source of transformers' classes says which fields there are.
"""

import inspect
import re
from typing import Any

import literal
import pytest
import tiny
import torch
import transformers
from test_norms import DEVICE
from torch import Tensor

from fcsd.distill.teacher.original import final_hidden, output_head
from fcsd.engine.logprobs import head_logits
from fcsd.errors import ConfigError
from fcsd.models import archs
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, logits_cap, unwired, wire
from fcsd.models.fused.model import fuse_parts
from fcsd.models.wiring import WiredLayer, Wiring

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
    attention_dropout=0.25,
    attention_bias=True,
    mlp_bias=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    use_sliding_window=True,
    sliding_window=5,
    layer_types=["full_attention", "sliding_attention"] * 2,
)
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
_GRANITE = dict(residual_multiplier=0.6, embedding_multiplier=3.0, attention_multiplier=0.4, logits_scaling=1.5)
# What moves the fields that a family has alone, or that would not be moved by the values above.
OWN: dict[str, dict[str, Any]] = {
    "seed_oss": dict(attention_bias=False, attention_out_bias=True, residual_dropout=0.3),
    "smollm3": dict(no_rope_layers=[1, 0, 1, 0]),
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
    "gpt_oss": dict(_EXPERTS, attention_bias=False, swiglu_limit=0.5, swiglu_alpha=1.2),
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
    "gemma3_text": dict(
        pad_token_id=3,
        query_pre_attn_scalar=9,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        num_key_value_heads=1,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    ),
    "granite": _GRANITE,
    "granitemoe": dict(_EXPERTS, **_GRANITE),
    "hyperclovax": dict(_GRANITE, use_post_norm=False),
    "minicpm3": dict(_LATENT, scale_depth=0.9, scale_emb=3, dim_model_base=20),
    "glm4": dict(attention_bias=False, num_key_value_heads=1),
}
# Fields that the source reads and that no row moves, and why.
EXEMPT = {
    "output_router_logits": "only adds an output beside the logits",
    "router_aux_loss_coef": "weighs a loss that is off",
    "use_bidirectional_attention": "makes an encoder of a decoder",
}


def guarded_config(arch: str) -> Any:
    """The config of a row. Fields that the family does not have are left out."""
    cls = getattr(transformers, ARCHS[arch].config)
    default = cls()
    moved = {name: value for name, value in {**MOVED, **OWN.get(arch, {})}.items() if hasattr(default, name)}
    return cls(**moved, tie_word_embeddings=not default.tie_word_embeddings)


def guarded_model(arch: str) -> Any:
    """A random model of the row whose norms are not one and whose biases are not zero, in eval mode."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(guarded_config(arch), dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


def fields_read(model: torch.nn.Module) -> set[str]:
    """The attributes of a config that the classes of a transformers model name, those of their parents included."""
    found = set()
    for cls in {base for module in model.modules() for base in type(module).__mro__}:
        if cls.__module__.startswith("transformers.models."):
            source = inspect.getsource(cls)
            found |= set(re.findall(r"\bconfig\.([a-z]\w*)", source))
            found |= set(re.findall(r"\b[gs]etattr\((?:self\.)?config, \"([a-z]\w*)\"", source))
    return found


def not_moved(config: Any, read: set[str]) -> set[str]:
    """Those of the fields that are numbers, booleans, tables or None, and as the class has them by default."""
    default = type(config)()
    values = {name: getattr(config, name, "") for name in read - EXEMPT.keys()}
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
    """Whether a model with no converted layer, and one with every layer taken apart, is transformers' to the bit."""
    ids = tiny.tokens()
    for parameter in model.parameters():  # gradients exist everywhere, so that none can be skipped
        parameter.grad = torch.zeros_like(parameter)
    before, equal = outputs(model, ids), []
    for wiring in (Wiring("farskip", ()), Wiring("standard", ALL)):
        wire(model, wiring)
        after = outputs(model, ids)
        equal += [len(before) == len(after), *map(torch.equal, before, after)]
    assert all(isinstance(layer, WiredLayer) for layer in model.model.layers)
    wire(model.eval(), unwired())
    return all(equal)


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_every_field_that_the_code_reads_is_moved(arch: str) -> None:
    model = guarded_model(arch)
    read = fields_read(model)
    assert {"hidden_size", "num_attention_heads"} < read
    assert not_moved(model.config, read) == set()


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_off_is_off(arch: str) -> None:
    assert off_is_off(guarded_model(arch))


@pytest.mark.parametrize("arch", tiny.CONFIGS)
@pytest.mark.skipif(DEVICE != "cpu", reason="dropout draws other numbers on a GPU")
def test_kernels_compute_the_same(arch: str) -> None:
    """With dropout, which a kernel could leave out."""
    model, ids = guarded_model(arch), tiny.tokens(batch=1, length=5)
    plain = outputs(model, ids)
    fuse_parts(model, arch_of(model.config), True)
    fused = outputs(model, ids)
    assert len(fused) == len(plain)
    for found, own in zip(fused, plain, strict=True):
        assert (found - own).norm() <= 1e-4 * own.norm() + 1e-6  # a key bias without positions has no gradient


@pytest.mark.parametrize("arch", tiny.CONFIGS)
@pytest.mark.parametrize("name", ["farskip", "ladder", "parallel"])
def test_on_is_the_table_cached_or_not_and_gradients_flow(arch: str, name: str) -> None:
    model, ids = guarded_model(arch), tiny.tokens(length=12)
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
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@torch.no_grad()
@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_scores_and_losses_see_the_logits_of_the_model(arch: str) -> None:
    """They compute them from final hidden states and the output head, a chunk at a time."""
    model, ids = guarded_model(arch), tiny.tokens()
    logits = model(ids, use_cache=False).logits
    scored = head_logits(model, model.model(ids, use_cache=False).last_hidden_state)
    torch.testing.assert_close(scored, logits, rtol=1e-4, atol=1e-4)
    if logits_cap(model.config) is not None:
        with pytest.raises(ConfigError, match="caps its logits"):
            output_head(model)
        return
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = final_hidden(model, {"input_ids": ids, "position_ids": positions})
    torch.testing.assert_close(hidden @ output_head(model).T, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("arch", "stem"), [("granite", "Granite"), ("glm4", "Glm4")])
def test_a_family_whose_layer_computes_something_else_is_found(
    arch: str, stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare row of a family with a residual multiplier, or with norms after its sub-blocks."""
    monkeypatch.setitem(ARCHS, arch, archs._row(arch, stem))  # pyright: ignore
    monkeypatch.setitem(OWN, arch, {"residual_multiplier": 0.5})
    assert not off_is_off(guarded_model(arch))


def test_a_field_that_nothing_moved_is_found() -> None:
    """Optional biases of llama, which the tiny models of other tests do not have."""
    model = tiny.model("llama")
    assert {"attention_bias", "mlp_bias", "rope_parameters", "rms_norm_eps"} <= not_moved(
        model.config, fields_read(model)
    )
