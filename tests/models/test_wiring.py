"""On is the paper's table, and transformers' features keep working, for each way in which layers are built.

``test_guard.py`` has farskip, ladder and parallel over all layers for every family, decoding and gradients included,
and off for every family.
"""

import literal
import pytest
import tiny
import torch
from rewired import logits_and_gradients, same

from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers, wire
from fcsd.models.wiring import Wiring, mixer

ALL = (0, 1, 2, 3)
ARCHS = tiny.BUILDS
# An MLP alone that reads the outdated stream is one function under three names.
WIRINGS = [
    ("farskip", "attn-only", ALL),
    ("farskip", "mlp-only", ALL),
    ("farskip", "full", (1, 3)),
    ("farskip", "full", (2, 3)),
    ("ladder", "attn-only", (1, 2)),
    ("ladder", "full", (2,)),
    ("parallel", "full", (0, 2)),
]
MORE = [("farskip", "full", ALL), ("ladder", "full", ALL), ("ladder", "mlp-only", ALL), ("parallel", "full", ALL)]


@pytest.mark.parametrize(
    ("arch", "name", "variant", "layers"),
    [(arch, *one) for arch in ARCHS for one in (*WIRINGS, *(MORE if arch in ("llama", "deepseek_v2") else ()))],
)
def test_on_is_the_table(arch, name, variant, layers):
    model, ids = tiny.model(arch), tiny.tokens()
    *streams, logits = literal.evaluate(model, ids, name, variant, set(layers))
    wire(model, Wiring(name, layers, variant=variant))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-5)
    for mine, true in zip(out.hidden_states[:-1], streams[:-1], strict=True):  # the last one is normed
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("name", ["farskip", "ladder"])
def test_distance_two(arch, name):
    model, ids = tiny.model(arch), tiny.tokens()
    *_, logits = literal.evaluate(model, ids, name, "full", set(ALL), distance=2)
    wire(model, Wiring(name, ALL, distance=2))
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_cached_decoding_across_borders_equals_the_full_forward(arch):
    model, ids = wire(tiny.model(arch), Wiring("ladder", (1, 2))), tiny.tokens(length=10)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        step = model(ids[:, :6], use_cache=True)
        pieces = [step.logits]
        for i in range(6, 10):
            step = model(ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
            pieces.append(step.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_generate(arch):
    model, ids = wire(tiny.model(arch), Wiring("farskip", ALL)), tiny.tokens(length=7)
    greedy = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, use_cache=True, **greedy), model.generate(ids, use_cache=False, **greedy))


@pytest.mark.parametrize("arch", ARCHS)
def test_gradient_checkpointing(arch):
    model = wire(tiny.model(arch), Wiring("ladder", (1, 2, 3))).train()
    before = logits_and_gradients(model)
    calls = []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layer = decoder_layers(model)[2]
    handle = mixer(arch_of(model.config).blocks, layer).register_forward_pre_hook(lambda *_: calls.append(1))
    assert same(before, logits_and_gradients(model))
    assert len(calls) == 2  # once forward, once recomputed: checkpointing did happen
    handle.remove()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        logits_and_gradients(model)


@pytest.mark.parametrize(  # sinks and soft caps are eager only
    "arch", [a for a in ARCHS if a not in ("gpt_oss", "mimo_v2_flash", "gemma2")]
)
def test_eager_and_sdpa_agree(arch):
    model, ids = wire(tiny.model(arch), Wiring("farskip", ALL)), tiny.tokens()
    model.set_attn_implementation("eager")
    eager = model(ids).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids).logits, eager, rtol=1e-4, atol=1e-5)


def test_farskip_without_shared_experts_is_ladder():
    model, ids = tiny.model("mixtral"), tiny.tokens()
    farskip = wire(model, Wiring("farskip", ALL))(ids).logits
    assert torch.equal(farskip, wire(model, Wiring("ladder", ALL))(ids).logits)


def test_mlp_only_is_parallel():
    model, ids = tiny.model("deepseek_v2"), tiny.tokens()
    only = wire(model, Wiring("ladder", ALL, variant="mlp-only"))(ids).logits
    assert torch.equal(only, wire(model, Wiring("parallel", ALL))(ids).logits)


@pytest.mark.parametrize("arch", ["deepseek_v2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("name", ["farskip", "ladder"])
@pytest.mark.parametrize("variant", ["full", "attn-only"])
@pytest.mark.parametrize("border", ["full", "partial"])
@pytest.mark.parametrize("layers", [(2, 3), (1, 3)])
def test_the_border_is_the_table(arch, name, variant, border, layers):
    model, ids = tiny.model(arch), tiny.tokens()
    *_, logits = literal.evaluate(model, ids, name, variant, set(layers), border=border)
    wire(model, Wiring(name, layers, variant=variant, border=border))
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["farskip", "ladder"])
def test_the_border_matters_after_a_layer_with_routed_experts(name):
    model, ids = tiny.model("deepseek_v2"), tiny.tokens()
    full, partial = (wire(model, Wiring(name, (2, 3), border=border))(ids).logits for border in ("full", "partial"))
    assert not torch.allclose(full, partial)


@pytest.mark.parametrize("name", ["standard", "parallel", "desync-2x"])
def test_a_border_that_a_wiring_cannot_have_is_refused(name):
    degree = 2 if name == "desync-2x" else 1
    assert Wiring(name, ALL, border="full", tp_degree=degree) == Wiring(name, ALL, tp_degree=degree)
    with pytest.raises(ValueError, match=f"wiring {name} has no partial border"):
        Wiring(name, ALL, border="partial", tp_degree=degree)


def test_block_round_trip():
    wiring = Wiring("ladder", (1, 2), variant="attn-only")
    block = wiring.to_block(base_model="a/b", base_revision="c", base_sha256="d")
    assert Wiring.from_block(block) == wiring
    assert block["border"] == "partial" and block["base_model"] == "a/b"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"extra": 1},
        {"wiring": "spiral"},
        {"variant": "half"},
        {"border": "none"},
        {"layers": [2, 1]},
        {"layers": [-1]},
        {"layers": ["1"]},
        {"layers": [True]},
        {"tp_degree": 2},
        {"distance": 0},
        {"distance": "2"},
    ],
)
def test_a_bad_block_is_refused(change):
    with pytest.raises(ValueError):
        Wiring.from_block({**Wiring("farskip", ALL).to_block(), **change})


def test_a_missing_key_is_refused():
    block = Wiring("farskip", ALL).to_block()
    del block["border"]
    with pytest.raises(ValueError, match="border"):
        Wiring.from_block(block)
    with pytest.raises(ValueError, match="has no fcsd block"):
        Wiring.from_block(None)


def test_a_layer_that_does_not_exist_is_refused_and_leaves_the_model_alone():
    model, ids = wire(tiny.model("llama"), Wiring("farskip", (1,))), tiny.tokens()
    before = model(ids).logits
    with pytest.raises(ConfigError, match="the model has 4"):
        wire(model, Wiring("farskip", (4,)))
    assert torch.equal(before, model(ids).logits)
