"""A model under simulated formats computes what a literal evaluation computes, for every layout and wiring."""

from collections.abc import Callable
from typing import Any

import literal
import pytest
import tiny
import torch
from studies.formats.simulated_all_reduce import rounding_of, simulate_all_reduce
from studies.formats.simulated_model import SimulatedCommunication, over_formats
from torch import Tensor, nn

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.models.archs import ARCHS
from fcsd.models.build import unwired, wire
from fcsd.models.wiring import Wiring

pytestmark = pytest.mark.lab

ALL = (0, 1, 2, 3)
TP = 2
CODES = Format.parse("int5:g32")
exact = torch.Tensor.float  # a format that rounds nothing


@torch.no_grad()
def _logits(model: Any, simulated: SimulatedCommunication | None = None) -> Tensor:
    if simulated is None:
        return model(tiny.tokens()).logits
    with over_formats(model, simulated):
        return model(tiny.tokens()).logits


REFUSED = {arch for arch in tiny.CONFIGS if arch == "gpt_oss" or ARCHS[arch].blocks.beside}


@pytest.mark.parametrize("arch", [arch for arch in tiny.CONFIGS if arch not in REFUSED])
def test_a_wire_that_rounds_nothing_changes_nothing(arch: str) -> None:
    """Also, a wire that rounds changes the logits, and afterwards the model is what it was, bit for bit."""
    model = tiny.model(arch)
    expected = _logits(model)
    int4 = rounding_of(Format.parse("int4"))
    wires = [SimulatedCommunication(all_reduce=exact, tp_degree=TP)]
    coarse = [SimulatedCommunication(all_reduce=int4, tp_degree=TP)]
    if arch not in tiny.DENSE:
        wires.append(SimulatedCommunication(exact, exact))
        wires.append(SimulatedCommunication(exact, exact, exact, TP, routed_by_tp=False))
        coarse += [SimulatedCommunication(dispatch=int4), SimulatedCommunication(combine=int4)]
    for simulated in wires:
        assert torch.allclose(_logits(model, simulated), expected, atol=2e-6 * float(expected.abs().max()))
    for simulated in coarse:
        assert not torch.allclose(_logits(model, simulated), expected, atol=1e-4)
    assert torch.equal(_logits(model), expected)


@pytest.mark.parametrize(
    "wiring",
    [
        Wiring("farskip", ALL),
        Wiring("farskip", (1, 3), border="partial"),
        Wiring("farskip", ALL, variant="mlp-only"),
        Wiring("farskip", ALL, variant="attn-only"),
        Wiring("farskip", ALL, distance=2),
        Wiring("ladder", (1, 2)),
        Wiring("parallel", ALL),
    ],
    ids=lambda wiring: f"{wiring.name}-{wiring.variant}-{wiring.distance}-{len(wiring.layers)}",
)
def test_outputs_that_share_an_all_reduce_reach_the_reads_of_the_wiring(wiring: Wiring, monkeypatch) -> None:
    """Where one all-reduce sums several outputs, no read between them may miss one."""
    model = tiny.model("deepseek_v2")
    monkeypatch.setattr(model.config, "fcsd", wiring.to_block(), raising=False)
    wire(model, wiring)
    expected = _logits(model)
    got = _logits(model, SimulatedCommunication(all_reduce=exact, tp_degree=TP))
    assert torch.allclose(got, expected, atol=1e-6) and torch.equal(_logits(model), expected)
    wire(model, unwired())
    assert not torch.allclose(_logits(model), expected, atol=1e-4)


def _partials(run: Callable[[], Tensor], *weights: Tensor) -> Tensor:
    """What each rank computes: the weights' columns of the other rank are zero. ``[ranks, *shape of run()]``."""
    found = []
    for rank in range(TP):
        others = [w.chunk(TP, dim=-1)[1 - rank] for w in weights]
        with literal.zeroed(*others):
            found.append(run())
    return torch.stack(found)


def _attention(attention: nn.Module, x: Tensor, more: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: attention(hidden_states=x, **more)[0]


def _mlp_partials(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The partial sums of the shared and of the routed experts; of a dense MLP and None."""
    if not hasattr(mlp, "experts"):
        return _partials(lambda: mlp(x), mlp.down_proj.weight), None
    with literal.zeroed(mlp.experts.down_proj):
        shared = _partials(lambda: literal.whole(mlp, x), mlp.shared_expert.down_proj.weight)
    with literal.zeroed(mlp.shared_expert.down_proj.weight):
        routed = _partials(lambda: literal.whole(mlp, x), mlp.experts.down_proj)
    return shared, routed


@pytest.mark.parametrize("farskip", [False, True])
@torch.no_grad()
def test_an_all_reduce_sums_what_the_schedule_sums(farskip: bool, monkeypatch) -> None:
    """Standard: ``AR(a)``, then ``AR(s + r)``. FarSkip: ``AR(a + s)`` and ``AR(r)``, and one for all of the last layer.

    Both sides compute in fp64, so that a different order of additions changes no code.
    """
    model = tiny.model("qwen2_moe", dtype=torch.float64, mlp_only_layers=[0])
    model.set_experts_implementation("eager")  # the others do not take fp64
    embeds, _, kwargs, _ = literal.layer_inputs(model, tiny.tokens())
    streams, partial = embeds, embeds
    for layer, more in zip(model.model.layers, kwargs, strict=True):
        x = layer.input_layernorm(partial if farskip else streams)
        a = _partials(_attention(layer.self_attn, x, more), layer.self_attn.o_proj.weight)
        if farskip:
            s, r = _mlp_partials(layer.mlp, layer.post_attention_layernorm(streams))
            if r is not None and layer is model.model.layers[-1]:  # the final norm is the first read of all its outputs
                a, r = a + r, None
            partial = streams + simulate_all_reduce(a + s, CODES)
            streams = partial if r is None else partial + simulate_all_reduce(r, CODES)
        else:
            streams = streams + simulate_all_reduce(a, CODES)
            s, r = _mlp_partials(layer.mlp, layer.post_attention_layernorm(streams))
            streams = streams + simulate_all_reduce(s if r is None else s + r, CODES)
    expected = model.lm_head(model.model.norm(streams))
    if farskip:
        wiring = Wiring("farskip", ALL)
        monkeypatch.setattr(model.config, "fcsd", wiring.to_block(), raising=False)
        wire(model, wiring)
    got = _logits(model, SimulatedCommunication(all_reduce=rounding_of(CODES), tp_degree=TP))
    assert torch.allclose(got, expected, atol=1e-6)


@torch.no_grad()
def test_rows_are_rounded_on_their_way_to_the_experts_and_back() -> None:
    """A token's row is rounded before its experts, and each expert's output before the router's weights."""
    model = tiny.model("mixtral", dtype=torch.float64)
    model.set_experts_implementation("eager")
    rounding = rounding_of(CODES)
    seen: list[tuple[Tensor, Tensor]] = []
    moe: Any = model.model.layers[2].mlp
    with over_formats(model, SimulatedCommunication(dispatch=rounding, combine=rounding)):
        handles = [
            moe.gate.register_forward_hook(lambda _, args, out: seen.append((args[0], *out[1:]))),
            model.model.layers[3].register_forward_pre_hook(lambda _, args: seen.append(args)),
            model.model.layers[2].post_attention_layernorm.register_forward_pre_hook(lambda _, args: seen.append(args)),
        ]
        model(tiny.tokens())
    for handle in handles:
        handle.remove()
    (before,), (tokens, weights, indices), (after,) = seen
    out = torch.zeros_like(tokens)
    rows = rounding(tokens).to(tokens.dtype)
    for token, (experts, scores) in enumerate(zip(indices.tolist(), weights, strict=True)):
        for expert, score in zip(experts, scores, strict=True):
            gate, up = (moe.experts.gate_up_proj[expert] @ rows[token]).chunk(2)
            result = moe.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)
            out[token] += score * rounding(result[None])[0]
    assert torch.allclose(after - before, out.view_as(after), atol=1e-5)


def test_what_cannot_be_simulated_is_refused() -> None:
    rounding = rounding_of(CODES)
    refusals = [
        ("gpt_oss", SimulatedCommunication(dispatch=rounding), "gpt_oss: its experts have biases"),
        ("llama", SimulatedCommunication(combine=rounding), "need routed experts, which llama does not have"),
        (
            "llama",
            SimulatedCommunication(all_reduce=rounding, tp_degree=3),
            "--tp-degree 3 does not divide the 4 attention heads",
        ),
    ]
    for arch, simulated, message in refusals:
        with pytest.raises(ConfigError, match=message), over_formats(tiny.model(arch), simulated):
            pass
    model = tiny.model("llama")
    model.config.fcsd = Wiring("desync-2x", ALL, tp_degree=2).to_block()
    refused = pytest.raises(ConfigError, match="desync-2x, whose ranks have streams of their own")
    with refused, over_formats(model, SimulatedCommunication(all_reduce=rounding, tp_degree=TP)):
        pass
