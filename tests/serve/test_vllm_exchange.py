"""Tokens in flight under data-parallel attention: two ranks over gloo compute what one process computes at once.

vLLM's classes are the doubles of ``test_vllm_layer.py``. A rank has all of the attention and of the shared experts, and
its part of the routed ones, and the ranks have different numbers of tokens.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_group
from test_vllm_layer import MIXED, NAMES, NORMED, RANKS, WIDTH, Layer, NormedLayer, literal, seed_of, weight, wirings
from torch import Tensor

from fcsd.models.schedule import Kind, layer_plans
from fcsd.models.wiring_block import Blocks, Wiring
from fcsd.serve.vllm import exchange, reduction
from fcsd.serve.vllm.layer import Wired, take_apart

LATER: tuple[Kind, ...] = ("moe-shared", "dense", "dense", "moe", "moe-shared")
GATHER, SCATTER = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Late:
    """A collective whose result appears when it is awaited. Until then it is NaN, and what is sent may not change."""

    def __init__(self, collective: Any, out: Tensor, x: Tensor, group: Any, events: list[str]) -> None:
        self.x, self.sent, self.out, self.found, self.events = x, x.clone(), out, torch.empty_like(out), events
        self.work = collective(self.found, self.sent, group=group, async_op=True)
        out.fill_(torch.nan)

    def wait(self) -> None:
        assert torch.equal(self.x, self.sent), "overwritten in flight"
        self.work.wait()
        self.out.copy_(self.found)
        self.events.append("wait")


def border(monkeypatch: pytest.MonkeyPatch, group: Any, rank: int, tokens: Sequence[int], blocks: Any) -> list[str]:
    """Put vLLM's data-parallel group and the context of a step where the operators look. Returns what they do."""
    events: list[str] = []

    def late(name: str, collective: Any) -> Any:
        def start(out: Tensor, x: Tensor, group: Any, async_op: bool) -> Late:
            assert async_op
            events.append(name)
            return Late(collective, out, x, group, events)

        return start

    state, context = ModuleType("vllm.distributed.parallel_state"), ModuleType("vllm.forward_context")
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
    step = SimpleNamespace(dp_metadata=metadata, no_compile_layers=blocks)
    vars(state)["get_dp_group"] = lambda: SimpleNamespace(device_group=group, rank_in_group=rank)
    vars(context)["get_forward_context"] = lambda: step
    for fake in (ModuleType("vllm"), ModuleType("vllm.distributed"), state, context):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(dist, "all_gather_into_tensor", late("gather", GATHER))
    monkeypatch.setattr(dist, "reduce_scatter_tensor", late("scatter", SCATTER))
    reduction.define_operators()
    exchange.define_operators()
    return events


def stream(tokens: int) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)


def run(
    wiring: Wiring,
    kinds: Sequence[Kind],
    rank: int,
    hidden: Tensor,
    blocks: Any,
    overlap_from: int,
    norms: dict[str, Any] | None = None,
) -> Tensor:
    """What the final norm reads on one rank, by vLLM's loop; ``norms`` names those of outputs on arrival."""
    reducer, layer = reduction.Reducer(1), Layer if norms is None else NormedLayer
    layers = [layer(0, i, kind, SimpleNamespace(now=lambda x: reduction.Sum(x, None))) for i, kind in enumerate(kinds)]
    names, of_layers = replace(NAMES, **(norms or {})), Blocks(**(norms or {}))
    for i, plan in layer_plans(wiring, kinds, range(len(kinds)), True, of_layers).items():
        mlp: Any = layers[i].mlp
        at = None
        if kinds[i] != "dense":
            mlp.experts.weight = weight(rank, seed_of(i, "routed"))
            blocks[f"{i}"], at = mlp, exchange.Exchange(f"{i}", overlap_from)
        take_apart(layers[i], Wired(names, plan, reducer, at))
    hidden, residual = hidden.clone(), None
    for layer in layers:
        hidden, residual = layer(torch.arange(len(hidden)), hidden, residual)
    assert not reduction.waits(), "everything was awaited"
    return hidden + residual


def on_a_rank(rank: int) -> None:
    blocks: Any = {}
    with pytest.MonkeyPatch.context() as patch:
        for tokens, stride in (((3, 1), 5), ((2, 2), 25)):
            events = border(patch, dist.group.WORLD, rank, tokens, blocks)
            for kinds in (MIXED, LATER):
                for wiring in wirings()[::stride]:
                    found = run(wiring, kinds, rank, stream(tokens[rank]), blocks, overlap_from=0)
                    expected = literal(wiring, kinds, stream(tokens[rank]), whole=("attn", "shared"))
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=str(wiring))
            for wiring in wirings()[:: 4 * stride]:
                found = run(wiring, MIXED, rank, stream(tokens[rank]), blocks, 0, NORMED)
                start, normed = stream(tokens[rank]), Blocks(**NORMED)
                expected = literal(wiring, MIXED, start, whole=("attn", "shared"), blocks=normed)
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"normed {wiring}")
            moe: tuple[Kind, ...] = ("moe-shared",) * 2
            events.clear()
            run(Wiring("farskip", (0, 1)), moe, rank, stream(tokens[rank]), blocks, overlap_from=0)
            assert events == ["gather", "wait", "scatter", *("wait", "gather"), "wait", "scatter", "wait"]
            events.clear()
            run(Wiring("farskip", (0, 1)), moe, rank, stream(tokens[rank]), blocks, overlap_from=8)
            assert events.index("scatter") == 3 and events[4] == "wait", "few tokens: everything is complete at once"


def test_every_wiring_with_tokens_in_flight_is_computed_as_its_reads_say():
    in_group(RANKS, on_a_rank)


def test_experts_that_scatter_their_output_themselves_are_refused(monkeypatch):
    whole = SimpleNamespace(wait=lambda: None)
    border(monkeypatch, None, 0, (2, 2), {"0": lambda rows: rows[:2]})
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, x, group, async_op: whole)
    x, here = torch.ones(2, 3), exchange.Exchange("0")
    with pytest.raises(RuntimeError, match="scatters its output itself"):
        here.experts(x, here.gather(x), None, x)
