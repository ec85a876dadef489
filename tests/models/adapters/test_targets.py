"""Which layers have adapters follows from the module tree; a name that is none is refused with the one meant."""

import pytest
import tiny
import torch
from torch import nn

from fcsd.errors import ConfigError
from fcsd.models.adapters.lora import add_adapters, matrices, merge, switch
from fcsd.models.adapters.targets import choose, choose_parts, shared_prefix
from fcsd.models.wiring import Wiring

DEFAULT = ["attention", "mlp", "shared_experts"]


def kinds(paths: tuple[str, ...]) -> set[str]:
    return {path.partition("layers.")[2].partition(".")[2] for path in paths}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("llama", "mlp.gate_proj mlp.up_proj mlp.down_proj self_attn.q_proj self_attn.k_proj self_attn.v_proj "),
        ("qwen2_moe", "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj "),
        ("deepseek_v32", "mlp.shared_experts.up_proj self_attn.kv_b_proj self_attn.q_a_proj mlp.down_proj"),
        ("granitemoehybrid", "shared_mlp.input_linear shared_mlp.output_linear self_attn.q_proj"),
        ("gemma4_text", "mlp.gate_proj self_attn.o_proj"),
        ("qwen3_next", "linear_attn.in_proj_qkvz linear_attn.out_proj self_attn.o_proj mlp.shared_expert.up_proj"),
    ],
)
def test_the_default_adapts_attention_and_what_every_token_passes(arch: str, expected: str) -> None:
    found = kinds(choose(tiny.model(arch), DEFAULT, []).adapted)
    assert set(expected.split()) <= found
    assert not any("indexer" in name or ".experts." in name or name.endswith("gate") for name in found)


def test_names_choose_layers_and_whole_parts_train_without_an_adapter() -> None:
    model = tiny.model("deepseek_v2")
    assert kinds(choose(model, ["o_proj", "mlp.shared_experts.up_proj"], []).adapted) == {
        "self_attn.o_proj",
        "mlp.shared_experts.up_proj",
    }
    chosen = choose(model, DEFAULT, ["norms", "last:25%", "routers"])
    assert "model.norm.weight" in chosen.trained and "model.layers.1.mlp.gate.weight" in chosen.trained
    assert "model.layers.3.self_attn.o_proj.weight" in chosen.trained
    assert not any(".mlp.experts." in name for name in chosen.trained)
    assert not any(path.startswith("model.layers.3.") for path in chosen.adapted)
    assert any(path.startswith("model.layers.2.") for path in chosen.adapted)


@pytest.mark.parametrize(
    ("targets", "parts", "message", "hint"),
    [
        (["q_prj"], [], "no linear layer 'q_prj'", "Did you mean 'q_proj'"),
        (["attention", "shared_experts"], [], "no shared_experts; it has attention, mlp", None),
        (["attention"], ["norm"], "no part 'norm'", "Did you mean 'norms'"),
        (["attention"], ["last:9"], "needs 9 layers, and the model has 4", None),
        (["attention"], ["self_attn"], "trains every layer that train.adapter.targets names", None),
    ],
)
def test_a_word_that_names_nothing_is_refused(
    targets: list[str], parts: list[str], message: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose(tiny.model("llama"), targets, parts)
    assert hint is None or hint in str(caught.value.hint)


def test_routed_experts_never_train_and_tied_heads_train_together() -> None:
    with pytest.raises(ConfigError, match="'experts' names no weight of this model that can train"):
        choose(tiny.model("deepseek_v2"), DEFAULT, ["experts"])
    with pytest.raises(ConfigError, match="embeddings and output head are one weight"):
        choose(tiny.model("llama", tie_word_embeddings=True), DEFAULT, ["head"])


def test_parts_without_adapters_train_with_their_routed_experts() -> None:
    model, wiring = tiny.model("deepseek_v2"), Wiring("farskip", (2, 3))
    chosen = choose_parts(model, ["converted"], wiring)
    layers = ("model.layers.2.", "model.layers.3.")
    assert chosen.trained == tuple(name for name, _ in model.named_parameters() if name.startswith(layers))
    assert any(".experts." in name for name in chosen.trained) and chosen.adapted == ()
    assert shared_prefix(model, chosen, wiring) == (2, 2)
    beside = choose(model, ["attention"], ["converted"], "all", wiring)
    assert "model.layers.2.mlp.gate.weight" in beside.trained
    assert not any(".experts." in name for name in beside.trained)
    with pytest.raises(ConfigError, match=r"optim\.train: no layer of this model is converted"):
        choose_parts(model, ["converted"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_change_nothing_until_they_learn_and_merge_into_the_weights(dtype: torch.dtype) -> None:
    model, ids = tiny.model("llama").to(dtype), torch.arange(12)[None]
    before, names = model(ids).logits, list(model.state_dict())
    state = torch.get_rng_state()
    paths = {path: path for path in choose(model, DEFAULT, []).adapted}
    layers = list(add_adapters(model, paths, 4, 8.0, seed=1).values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(ids).logits, before)
    for layer in layers:
        down, up = matrices(layer)
        assert down.dtype == up.dtype == dtype and down.abs().max() > 0
        nn.init.normal_(up, std=0.05)
    learned = model(ids).logits
    assert not torch.equal(learned, before)
    switch(layers, on=False)
    assert torch.equal(model(ids).logits, before)
    switch(layers, on=True)
    assert torch.equal(model(ids).logits, learned)
    merge(model, layers)
    assert list(model.state_dict()) == names
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(model(ids).logits, learned, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_an_adapted_layer_computes_and_learns_what_the_layer_of_peft_does(bias: bool, factor: float) -> None:
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(6, 5, bias=bias).double())
    layer = add_adapters(holder, {"0": "0"}, 2, 2 * factor, seed=1)["0"]
    down, up = matrices(layer)
    nn.init.normal_(up)
    for needed in (True, False):
        found = []
        for one in (layer, super(type(layer), layer).forward):
            x = torch.linspace(-1, 1, 36, dtype=torch.float64).view(2, 3, 6).requires_grad_(needed)
            output = one(x)
            inputs = (down, up, x) if needed else (down, up)
            found.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
        torch.testing.assert_close(*found)


def test_an_adapter_starts_alike_whatever_other_layers_have_one() -> None:
    one, two = tiny.model("llama"), tiny.model("llama")
    path = "model.layers.2.self_attn.q_proj"
    alone = add_adapters(one, {path: path}, 4, 4.0, seed=3)[path]
    every = add_adapters(two, {p: p for p in choose(two, DEFAULT, []).adapted}, 4, 4.0, seed=3)
    among, beside = every[path], every["model.layers.1.self_attn.q_proj"]
    other = add_adapters(tiny.model("llama"), {path: path}, 4, 4.0, seed=4)[path]
    assert torch.equal(matrices(alone)[0], matrices(among)[0])
    assert not torch.equal(matrices(alone)[0], matrices(other)[0])
    assert not torch.equal(matrices(alone)[0], matrices(beside)[0]), "layers of one shape start unlike each other"


@pytest.mark.parametrize(
    ("wiring", "parts", "layers", "expected"),
    [
        (Wiring("farskip", (2, 3)), [], "converted", (2, 2)),
        (Wiring("farskip", (2, 3)), [], "last:1", (3, 2)),
        (Wiring("farskip", (2, 3)), [], "all", (0, 0)),
        (Wiring("ladder", (2, 3)), [], "converted", (2, 1)),  # layer 1 passes on what layer 2 is not to read
        (Wiring("farskip", (1, 3)), ["head"], "converted", (1, 1)),
        (Wiring("farskip", (2, 3)), ["norms"], "converted", (0, 0)),
        (Wiring("farskip", (2, 3)), ["embeddings"], "converted", (0, 0)),
        (Wiring("farskip", (2, 3)), ["last:25%"], "converted", (2, 2)),
    ],
)
def test_layers_before_all_that_trains_and_all_that_is_rewired_are_shared(
    wiring: Wiring, parts: list[str], layers: str, expected: tuple[int, int]
) -> None:
    model = tiny.model("llama", tie_word_embeddings=False)
    assert shared_prefix(model, choose(model, DEFAULT, parts, layers, wiring), wiring) == expected


def test_a_head_that_is_the_embedding_is_before_the_layers() -> None:
    model, wiring = tiny.model("llama", tie_word_embeddings=True), Wiring("farskip", (2, 3))
    assert shared_prefix(model, choose(model, DEFAULT, ["embeddings", "head"], "converted", wiring), wiring) == (0, 0)


@pytest.mark.parametrize(
    ("layers", "message"),
    [("converted", "no layer of this model is converted"), ("last:9", "needs 9 layers"), ("none", "nothing there is")],
)
def test_layers_that_cannot_have_adapters_are_refused(layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(tiny.model("llama"), DEFAULT, [], layers)
