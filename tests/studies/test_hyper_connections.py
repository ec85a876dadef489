"""What a read may miss with hyper-connections: the wired deepseek_v4, its literal reading, and the stored figures."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_group
from studies.hyper_connections import measure, page
from studies.hyper_connections.literal import evaluate, passed_on
from studies.hyper_connections.wired import BLOCKS, CHOICES, Arrive, Choice, wire
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from fcsd.models.schedule import Output, reductions
from fcsd.models.wiring import unwire_layers, wire_layers
from fcsd.models.wiring_block import Blocks, Wiring

pytestmark = pytest.mark.lab
ALL, OFF = (0, 1, 2), Wiring("standard", ())
LADDER, FARSKIP = Wiring("ladder", ALL), Wiring("farskip", ALL)
WIRINGS = [LADDER, FARSKIP, Wiring("parallel", ALL)]
WIRINGS += [Wiring(name, (1,), border=border) for name in ("ladder", "farskip") for border in ("full", "partial")]


def tiny(streams: int = 4, **changes: Any) -> tuple[Any, Tensor]:
    """A model with large weights, so that every read matters, and tokens."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(measure.config(streams, len(ALL), initializer_range=0.1, **changes)).eval()
    return model, torch.randint(0, 256, (2, 20))


def differs(found: Tensor, known: Tensor) -> float:
    return float((found - known).abs().max())


def test_off_is_transformers_bit_for_bit() -> None:
    model, ids = tiny(mlp_layer_types=["hash_moe", "moe", "moe"])
    model.model.layers[0].mlp.gate.tid2eid.random_(0, 8)
    found = []
    for apart in (None, False, True):
        if apart is not None:
            wire(model, OFF, every=apart)
        model.zero_grad()
        logits = model(ids, labels=ids).logits
        logits.logsumexp(-1).sum().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 50
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda w: f"{w.name}-{len(w.layers)}-{w.border}")
@torch.no_grad()
def test_every_choice_is_the_literal_reading(wiring: Wiring) -> None:
    model, ids = tiny(mlp_layer_types=["hash_moe", "moe", "moe"])
    found = []
    for choice in (
        Choice(*of) for of in product(("mixed", "unmixed"), ("stale", "fresh"), ("carried", "direct", "joined"))
    ):
        wire(model, wiring, choice)
        found.append(model(ids).logits)
        wire(model, OFF)
        known, _ = evaluate(model, ids, wiring.name, set(wiring.layers), wiring.border, choice)
        assert differs(found[-1], known) < 1e-4, choice
        assert all(differs(found[-1], other) > 1e-2 for other in [*found[:-1], model(ids).logits]), choice


@torch.no_grad()
def test_one_stream_that_is_not_mixed_is_fcsds_own_wiring() -> None:
    model, ids = tiny(1)
    one = lambda x: (torch.ones(*ids.shape, 1), torch.ones(*ids.shape, 1, 1), x.squeeze(2))  # noqa: E731
    layers = model.model.layers
    for layer in layers:
        layer.attn_hc.forward = layer.ffn_hc.forward = one
    model.model.hc_head.forward = lambda x: x.squeeze(2)
    kwargs = passed_on(model, ids)
    for wiring in WIRINGS:
        wire_layers(layers, wiring, BLOCKS, every=True)
        x = model.model.embed_tokens(ids)
        for layer in layers:
            x = layer(x, **kwargs)
        known = model.lm_head(model.model.norm(x))
        unwire_layers(layers)
        for name, choice in CHOICES.items():
            wire(model, wiring, choice, every=True)
            assert torch.equal(model(ids).logits, known), (wiring, name)
        wire(model, OFF)
        assert differs(model(ids).logits, known) > 1e-2


@pytest.mark.parametrize("name", CHOICES)
@torch.no_grad()
def test_outputs_of_zero_leave_the_model_as_it_is(name: str) -> None:
    """But for streams that are read before they are mixed."""
    model, ids = tiny()
    for layer in model.model.layers:
        layer.self_attn.o_b_proj.weight.zero_()
        layer.mlp.experts.down_proj.zero_()
    known = model(ids).logits
    wire(model, FARSKIP, CHOICES[name])
    assert (differs(model(ids).logits, known) < 1e-5) == (name != "unmixed")


@pytest.mark.parametrize("name", CHOICES)
@torch.no_grad()
def test_the_sum_of_streams_is_a_residual_stream(name: str) -> None:
    """Each output is in it with the sum of its own H_post, but for joined ones."""
    model, ids = tiny(hc_eps=1e-9, hc_sinkhorn_iters=100)
    wire(model, LADDER, CHOICES[name])
    found: list[Tensor] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda _, args: found.append(args[0].sum(2)))
    model(ids)
    hook.remove()
    wire(model, OFF)
    _, written = evaluate(model, ids, "ladder", set(ALL), "partial", CHOICES[name])
    known = 4 * model.model.embed_tokens(ids) + sum(gain.unsqueeze(-1) * output for gain, output in written)
    assert (differs(found[0], known) < 1e-3) == (name != "joined")


@torch.no_grad()
def in_two_ranks(rank: int, name: str) -> tuple[Tensor, bool, dict[Output, set[tuple[int, str]]]]:
    """Logits with outputs in flight, whether they are those with blocking sums, and what covers each output.

    A rank holds half of the output projections. Under farskip the shared experts are whole, as transformers has them.
    """
    model, ids = tiny()
    for layer in model.model.layers:
        products = [layer.self_attn.o_b_proj.weight, layer.mlp.experts.down_proj]
        for weight in products + [layer.mlp.shared_experts.down_proj.weight] * (name == "ladder"):
            half = weight.shape[-1] // 2
            weight[..., :half] *= rank == 0
            weight[..., half:] *= rank == 1
    blocks: list[tuple[int, str]] = []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda _, args, i=i: blocks.append((i, "attn")))
        layer.mlp.gate.register_forward_pre_hook(lambda _, args, i=i: blocks.append((i, "mlp")))
    covers: dict[Output, set[tuple[int, str]]] = {}

    def start(output: Tensor, blocking: bool) -> Arrive:
        whole, count = output.clone(), len(blocks)
        layer, by = blocks[-1]
        work: Any = dist.all_reduce(whole, async_op=True)
        if blocking:
            work.wait()

        def arrive() -> Tensor:
            covers[Output(layer, "attn" if by == "attn" else "routed")] = set(blocks[count:])
            work.wait()
            return whole

        return arrive

    wiring, logits = Wiring(name, ALL), []
    for blocking in (True, False):
        blocks.clear()
        wire(model, wiring, start=lambda output, blocking=blocking: start(output, blocking))
        logits.append(model(ids).logits)
    return logits[1], torch.equal(*logits), covers


@pytest.mark.parametrize("wiring", [LADDER, FARSKIP], ids=lambda w: w.name)
@torch.no_grad()
def test_outputs_in_flight_give_the_bits_of_blocking_sums(wiring: Wiring) -> None:
    model, ids = tiny()
    wire(model, wiring)
    apart = Blocks(attn_norms=(None, "after"))  # outputs of two sub-blocks share no sum, as if each had a norm
    schedule = [r for layer in reductions(wiring, ["moe-shared"] * len(ALL), apart) for r in layer]
    for logits, same, covers in in_group(2, in_two_ranks, wiring.name):
        assert same and differs(logits, model(ids).logits) < 1e-4
        for reduction in schedule:
            known = {(o.layer, "attn" if o.part == "attn" else "mlp") for o in reduction.covered_by}
            assert covers.pop(reduction.sums[-1]) == known
        assert not covers


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    text = (repo / page.PAGE).read_text()
    assert page.filled(text, repo) == text, "run python -m studies.hyper_connections.page"


@pytest.mark.parametrize("wiring", ["ladder", "farskip"])
@pytest.mark.parametrize("key", ["kl", "kl_healed"])
def test_what_the_page_says_of_the_order_holds_in_every_seed(repo: Path, wiring: str, key: str) -> None:
    runs = json.loads((repo / page.RAW).read_text())["runs"]
    by_choice = {name: page.values(runs, wiring, name, key) for name in CHOICES}
    assert all(len(found) == measure.SEEDS for found in by_choice.values())
    for seed in range(measure.SEEDS):
        order = sorted(by_choice, key=lambda name: by_choice[name][seed])
        assert order[0] == "fresh" and order[-1] == "joined"
