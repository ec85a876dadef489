"""Progressive conversion: each stage computes what a conversion of its layers computes; evaluations see all of them."""

from dataclasses import replace

import pytest
import tiny
import torch
from rewired import logits_and_gradients, rewired, same

from fcsd.errors import ConfigError
from fcsd.models.build import decoder_layers, unwired, wire
from fcsd.models.staged import conversion_groups, stage_layers
from fcsd.models.wiring import Wiring

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v2", "qwen3_moe"])
@pytest.mark.parametrize(
    "wiring",
    [Wiring("farskip", ALL), Wiring("ladder", (1, 2, 3)), Wiring("parallel", ALL)],
    ids=lambda wiring: wiring.name,
)
def test_a_stage_is_the_conversion_of_its_layers(arch: str, wiring: Wiring) -> None:
    original, model = rewired(arch, wiring)
    full = logits_and_gradients(model)
    order = ["3", "1", "0,2"] if 0 in wiring.layers else [3, "1-2"]
    stages = stage_layers(model, order)
    assert len(stages.groups) == len(order)
    assert same(logits_and_gradients(model), full)
    for number in range(len(order)):
        stages.convert(number)
        done = tuple(sorted(layer for group in stages.groups[:number] for layer in group))
        wire(original, replace(wiring, layers=done))
        found = logits_and_gradients(model)
        assert same(found, logits_and_gradients(original)) and not same(found, full)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert same(logits_and_gradients(model), found)
        model.gradient_checkpointing_disable()
        model.eval()
        assert torch.equal(model(tiny.tokens(), use_cache=False).logits.detach(), full[0])  # only training is staged
        model.train()
    wire(model, unwired())
    wire(original, unwired())
    assert same(logits_and_gradients(model), logits_and_gradients(original))


def test_weights_and_config_know_nothing_of_it() -> None:
    _, model = rewired("deepseek_v2", Wiring("farskip", ALL))
    before = (model.config.to_dict(), list(model.state_dict()))
    stage_layers(model).convert(1)
    assert (model.config.to_dict(), list(model.state_dict())) == before


def test_compiled_layers_compute_every_stage() -> None:
    _, model = rewired("llama", Wiring("farskip", ALL))
    stages, expected, graphs = stage_layers(model), [], []
    for number in range(5):
        stages.convert(number)
        expected.append(model(tiny.tokens(), use_cache=False).logits.detach())
    for layer in decoder_layers(model):
        layer.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for number, logits in enumerate(expected):
        stages.convert(number)
        found = model(tiny.tokens(), use_cache=False).logits.detach()
        assert (found - logits).abs().max() < 1e-5 * logits.abs().max()
    assert len(graphs) <= 3 * len(ALL)  # not converted, converted, and converted after a converted layer


def test_the_order_names_every_rewired_layer_once() -> None:
    wiring = Wiring("farskip", (1, 2, 3))
    assert conversion_groups(wiring, 4, None) == ((3,), (2,), (1,))
    assert conversion_groups(wiring, 4, [2, "1,3"]) == ((2,), (1, 3))
    for order, words in (
        ([2, 3], "names the layers 2-3, but"),
        (["1-3", 2], "layers 1-3, some of them twice, but the student's rewired layers are 1-3"),
        (["all"], "layers 0-3, but"),
        (["1-3", "none"], "the group none has no layer"),
        ([1, "2-"], r"train\.progressive_order: layers '2-' is not understood"),
        ([1, 4], r"train\.progressive_order: .* the model has 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            conversion_groups(wiring, 4, order)
    with pytest.raises(ConfigError, match="desync-2x cannot be converted progressively"):
        conversion_groups(Wiring("desync-2x", ALL, tp_degree=2), 4, None)
    with pytest.raises(ConfigError, match="no rewired layer"):
        conversion_groups(unwired(), 4, None)
