"""An annealed wiring is the original at weight 0, itself at weight 1, and the sum over what is in flight in between."""

import pytest
import tiny
import torch
from rewired import logits_and_gradients, rewired, same
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fcsd.errors import ConfigError
from fcsd.models import wiring as reference
from fcsd.models.annealed import anneal
from fcsd.models.build import decoder_layers, unwired, wire
from fcsd.models.wiring import Wiring

ALL = (0, 1, 2, 3)
WIRINGS = [Wiring("farskip", ALL), Wiring("ladder", (1, 2, 3)), Wiring("ladder", ALL, distance=2)]
ARCHS = ("llama", "deepseek_v2", "qwen3_moe", "glm_moe_dsa")


def relative_error(value: Tensor, expected: Tensor) -> float:
    """The norm of the difference, divided by that of ``expected``; 0 if both are 0."""
    return float((value - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda wiring: f"{wiring.name}-{wiring.distance}")
def test_both_ends(arch: str, wiring: Wiring) -> None:
    original, model = rewired(arch, wiring)
    wired = logits_and_gradients(model)
    annealing = anneal(model)
    assert same(logits_and_gradients(model), wired)  # weight 1
    annealing.weight = 0.0
    for value, expected in zip(logits_and_gradients(model), logits_and_gradients(original), strict=True):
        assert relative_error(value, expected) < 1e-5
    model.eval()
    assert torch.equal(model(tiny.tokens(), use_cache=False).logits.detach(), wired[0])  # only training is annealed
    model.train()
    wire(model, unwired())
    assert same(logits_and_gradients(model), logits_and_gradients(original))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda wiring: f"{wiring.name}-{wiring.distance}")
def test_between_them_a_read_adds_its_share_of_what_is_in_flight(
    arch: str, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = rewired(arch, wiring)
    anneal(model).weight = 0.3
    annealed = logits_and_gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert same(logits_and_gradients(model), annealed)

    _, plain = rewired(arch, wiring)

    def read(streams, depth):
        available, streams = streams[: depth + 1][-1], streams[: depth + 1]
        in_flight = streams[0] - available
        return available + 0.7 * in_flight, streams

    wired = logits_and_gradients(plain)
    monkeypatch.setattr(reference, "read", read)
    for value, expected in zip(annealed, logits_and_gradients(plain), strict=True):
        assert relative_error(value, expected) < 1e-5
    assert relative_error(annealed[0], wired[0]) > 1e-2


def test_compiled_layers_take_a_new_weight_without_being_compiled_again() -> None:
    """The backend differentiates: one that does not would take a number that changes for an input of its graph.

    In bf16 it shows that compiled layers do not round the weight.
    """
    torch._dynamo.reset()
    _, model = rewired("llama", WIRINGS[0])
    annealing, counter = anneal(model.bfloat16()), CompileCounterWithBackend("aot_eager")
    weights, expected = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0), []
    for annealing.weight in weights:
        expected.append(logits_and_gradients(model))
    for layer in decoder_layers(model)[1:3]:
        layer.compile(backend=counter)
    counts = []
    for annealing.weight, values in zip(weights, expected, strict=True):
        compiled = logits_and_gradients(model)
        assert torch.equal(compiled[0], values[0])  # gradients are summed in another order
        for value, plain in zip(compiled, values, strict=True):
            assert relative_error(value, plain) < 2e-2
        counts.append(counter.frame_count)
    assert counts == [1, 1, 1, 1, 1, 2]  # for any weight below 1, and for weight 1


def test_weights_and_config_know_nothing_of_it() -> None:
    _, model = rewired("deepseek_v2", WIRINGS[0])
    before = (model.config.to_dict(), [name for name, _ in model.state_dict().items()])
    anneal(model).weight = 0.5
    assert (model.config.to_dict(), [name for name, _ in model.state_dict().items()]) == before


def test_what_cannot_be_annealed_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rewired layer"):
        anneal(tiny.model("llama"))
    with pytest.raises(ConfigError, match="desync-2x cannot be annealed"):
        anneal(rewired("llama", Wiring("desync-2x", ALL, tp_degree=2))[1])
