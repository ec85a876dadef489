"""The plugin's layers compute what a wiring says, on two ranks, with sums that are useless before they are awaited.

vLLM's classes are replaced by doubles of their interface: layers that get and return ``(hidden, residual)``, norms that
add the residual, projections with ``reduce_results``, and experts that hold the shared ones. The two ranks are threads.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from fcsd.models.arch import VllmNames
from fcsd.models.schedule import MLP_PARTS, Kind, LayerPlan, Output, Read, Step, layer_plans, reads_of
from fcsd.models.wiring_block import DESYNC, Blocks, Wiring, kept_reductions
from fcsd.serve.vllm.gates import gate_attention
from fcsd.serve.vllm.layer import Wired, check_handed_on, kind_of, read_ahead, take_apart
from fcsd.serve.vllm.reduction import Reducer, Sum

RANKS, TOKENS, WIDTH = 2, 3, 4
NAMES = VllmNames(shared="shared_experts")
NORMED: dict[str, Any] = dict(
    attn_norms=("input_layernorm", "post_self_attn_layernorm"), mlp_norms=("post_attention_layernorm", "post_mlp")
)
AS_IS: dict[str, Any] = dict(attn_norms=(None, "post_self_attn_layernorm"), mlp_norms=(None, "post_mlp"))
FACTOR = 0.5
# The weights of the norms before a sub-block and on arrival of its output. No two are alike, so none can be another's.
BEFORE, AFTER = {"attn": 1.1, "mlp": 0.9}, {"attn": 0.8, "mlp": 1.3}
MIXED: tuple[Kind, ...] = ("dense", "moe-shared", "moe", "moe-shared", "dense")


class Meeting:
    """Where the ranks exchange what they add to a sum."""

    def __init__(self) -> None:
        self.summands: dict[tuple[int, int], torch.Tensor] = {}
        self.barrier = threading.Barrier(RANKS, timeout=30)

    def total(self, number: int) -> torch.Tensor:
        self.barrier.wait()
        return sum((self.summands[number, rank] for rank in range(RANKS)), torch.tensor(0.0, dtype=torch.float64))


class LateReducer(Reducer):
    """A sum is NaN until it is awaited, and what was added to it may not change before."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(RANKS)
        vars(self).update(rank=rank, meeting=meeting, started=[], slots={}, log=[], awaited=0, own=[], inner={})

    def start(self, x: torch.Tensor, step: Step) -> Sum:
        assert step.slot not in self.slots, "a slot has one sum at a time"
        number = len(self.started)
        self.slots[step.slot] = number
        total = torch.full_like(x, torch.nan)
        self.meeting.summands[number, self.rank] = x.clone()
        self.started.append(total)
        self.log.append("start")
        return Sum(total, x, slot=step.slot)

    def hold(self, x: torch.Tensor, own: torch.Tensor | None) -> None:
        self.own.append((own, None if own is None else own.clone()))

    def start_held(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        own, _ = self.own[-1]
        assert step.joins == (own is not None)
        total = self.start(x if own is None else own + x, step).total
        self.inner[len(self.started) - 1] = self.own.pop()
        return total

    def wait(self, sum_: Sum, newest: torch.Tensor) -> torch.Tensor:
        if sum_.summand is not None:
            number = self.slots.pop(sum_.slot)
            assert self.started[number] is sum_.total
            sent = self.meeting.summands[number, self.rank]
            if number in self.inner:
                own, sent = self.inner[number]
                assert own is None or own is sum_.summand, "kept until the sum is awaited"
            assert sent is None or torch.equal(sum_.summand, sent), "overwritten in flight"
            sum_.total.copy_(self.meeting.total(number))
            vars(self)["awaited"] += 1
            self.log.append("wait")
        return sum_.total

    def cover(self, x: torch.Tensor, newest: torch.Tensor, sums: tuple[Sum, ...]) -> None:
        in_flight = any(sum_.total is newest for sum_ in sums)
        assert not in_flight or x is not newest, "what covers a sum does not read it"

    def now(self, x: torch.Tensor) -> Sum:
        assert self.awaited == sum(entry == "start" for entry in self.log), "nothing else may be in flight"
        self.log.append("now")
        number = len(self.started)
        self.meeting.summands[number, self.rank] = x
        self.started.append(x)
        return Sum(self.meeting.total(number), None)


class Norm(nn.Module):
    """vLLM's RMSNorm with one weight for all; it writes over its arguments, as vLLM's kernel does."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm(x, self.weight)
        residual += x
        x.copy_(norm(residual, self.weight))
        return x, residual


class Projection(nn.Module):
    """A row-parallel projection: this rank's part of its output, or the sum."""

    def __init__(self, rank: int, seed: int, reducer: Any) -> None:
        super().__init__()
        self.weight = weight(rank, seed)
        self.reducer, self.reduce_results = reducer, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weight
        return self.reducer.now(out).total if self.reduce_results else out


class Attention(nn.Module):
    def __init__(self, rank: int, seed: int, reducer: Any) -> None:
        super().__init__()
        self.o_proj = Projection(rank, seed, reducer)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.o_proj(hidden_states)


class Mlp(nn.Module):
    def __init__(self, rank: int, seed: int, reducer: Any) -> None:
        super().__init__()
        self.down_proj = Projection(rank, seed, reducer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(x)


class SharedExperts:
    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer


class Runner(nn.Module):
    """Routed experts, and the shared ones unless they were taken out."""

    _fused_output_is_reduced = False

    def __init__(self, rank: int, seed: int, reducer: Any, shared: nn.Module | None) -> None:
        super().__init__()
        self.weight, self.reducer = weight(rank, seed), reducer
        self._shared_experts: Any = None if shared is None else SharedExperts(shared)
        self._forward_entry = self._select_forward()

    def _select_forward(self) -> Any:
        shared = self._shared_experts
        return lambda x: (None if shared is None else shared._layer(x), x @ self.weight)

    def _maybe_reduce_shared_expert_output(self, output: torch.Tensor | None) -> torch.Tensor | None:
        return output

    def _maybe_reduce_final_output(self, states: torch.Tensor, trunc_size: int | None) -> torch.Tensor:
        return self.reducer.now(states).total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, routed = self._forward_entry(x)
        shared = self._maybe_reduce_shared_expert_output(shared)
        return self._maybe_reduce_final_output(routed if shared is None else shared + routed, None)


class Moe(nn.Module):
    def __init__(self, rank: int, seed: int, reducer: Any, shared: bool) -> None:
        super().__init__()
        self.shared_experts = Mlp(rank, seed, reducer) if shared else None
        if self.shared_experts is not None:
            self.shared_experts.down_proj.reduce_results = False
        self.experts = Runner(rank, seed + 1, reducer, self.shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


class Layer(nn.Module):
    """A decoder layer as vLLM has it."""

    def __init__(self, rank: int, index: int, kind: Kind, reducer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(BEFORE["attn"]), Norm(BEFORE["mlp"])
        self.self_attn = Attention(rank, seed_of(index, "attn"), reducer)
        seed = seed_of(index, "shared")
        self.mlp = Mlp(rank, seed, reducer) if kind == "dense" else Moe(rank, seed, reducer, kind == "moe-shared")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class NormedLayer(Layer):
    """A decoder layer that norms its outputs before it adds them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.post_self_attn_layernorm, self.post_mlp = Norm(AFTER["attn"]), Norm(AFTER["mlp"])

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.post_self_attn_layernorm(self.self_attn(positions, hidden))
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.post_mlp(self.mlp(hidden)), residual


class WholeLayer(NormedLayer):
    """A decoder layer that reads the stream as it is, and passes it on whole beside something that no layer reads."""

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden = hidden + self.post_self_attn_layernorm(self.self_attn(positions, hidden))
        return hidden + self.post_mlp(self.mlp(hidden)), hidden


class BareLayer(Layer):
    """A decoder layer that multiplies its outputs, and passes on the whole stream alone.

    Its shared experts are beside its MLP. They are the only ones of a dense layer.
    """

    def __init__(self, rank: int, index: int, kind: Kind, reducer: Any) -> None:
        super().__init__(rank, index, "moe", reducer)
        self.mlp = None if kind == "dense" else self.mlp
        self.shared_mlp = None if kind == "moe" else Mlp(rank, seed_of(index, "shared"), reducer)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden)) * FACTOR
        x = self.post_attention_layernorm(hidden)
        return hidden + sum(part(x) for part in (self.mlp, self.shared_mlp) if part is not None) * FACTOR


# The double of a layer, what the row says of it, and what multiplies its outputs.
FORMS: dict[str, tuple[type[Layer], VllmNames, float | None]] = {
    "stock": (Layer, NAMES, None),
    "normed": (NormedLayer, replace(NAMES, **NORMED), None),
    "whole": (WholeLayer, replace(NAMES, whole=True, **AS_IS), None),
    "bare": (BareLayer, replace(NAMES, whole=True, shared="shared_mlp", shared_beside=True), FACTOR),
}


def seed_of(index: int, part: str) -> int:
    return 10 * index + {"attn": 0, "shared": 1, "routed": 2}[part]


def weight(rank: int, seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def embedding() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def norm(x: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    return weight * x / (1 + x.abs())


def sub_block(part: str) -> str:
    return "attn" if part == "attn" else "mlp"


def read(x: torch.Tensor, part: str) -> torch.Tensor:
    """What a part computes from, of the stream ``x``."""
    return norm(x, BEFORE[sub_block(part)])


def literal(
    wiring: Wiring,
    kinds: Sequence[Kind],
    start: torch.Tensor | None = None,
    whole: Sequence[str] = (),
    blocks: Blocks = Blocks(),  # noqa: B008
    factor: float = 1.0,
) -> torch.Tensor:
    """The stream that the final norm reads, output by output from the sets that each read includes.

    ``start`` is the embedding. The parts ``whole`` are on every rank, and the others are sums over the ranks. A norm on
    arrival takes shared and routed experts together.
    """
    reads, outputs = reads_of(wiring, kinds, blocks), {}
    start = embedding() if start is None else start

    def stream(place: Read) -> torch.Tensor:
        return start + factor * sum(outputs[output] for output in sorted(reads[place]))

    for i, kind in enumerate(kinds):
        for part in ("attn", *MLP_PARTS[kind]):
            x = stream(Read(i, "attn" if part == "attn" else "mlp"))
            x = x if blocks.attn_norms[0] is None else read(x, part)
            seed = seed_of(i, part)
            ranks = range(1 if part in whole else RANKS)
            outputs[Output(i, part)] = sum(x @ weight(rank, seed) for rank in ranks)
            if blocks.normed and part in ("attn", MLP_PARTS[kind][-1]):
                first = Output(i, "attn" if part == "attn" else MLP_PARTS[kind][0])
                both = {Output(i, part), first}
                normed = norm(sum(outputs[output] for output in both), AFTER[sub_block(part)])
                outputs |= dict.fromkeys(both, torch.zeros(())) | {first: normed}
    return stream(Read(len(kinds), "norm"))


def literal_desync(wiring: Wiring, kinds: Sequence[Kind], factor: float) -> torch.Tensor:
    """The same for Desync: a residual for each rank."""
    local = [embedding() for _ in range(RANKS)]
    keeps = kept_reductions(wiring.layers, wiring.kept)
    for i in range(len(kinds)):
        for part, kept in zip(("attn", "shared"), keeps.get(i, (True, True)), strict=True):
            outs = [factor * read(local[rank], part) @ weight(rank, seed_of(i, part)) for rank in range(RANKS)]
            if kept:
                whole = sum(local[rank] / RANKS + outs[rank] for rank in range(RANKS))
                local = [whole.clone() for _ in range(RANKS)]
            else:
                local = [local[rank] + outs[rank] for rank in range(RANKS)]
    return local[0]


def run_rank(
    rank: int, meeting: Meeting, wiring: Wiring, kinds: Sequence[Kind], stages: list[range], form: str, beside: bool
) -> Any:
    """The final stream on one rank, by vLLM's loop; and what the reducer was asked."""
    reducer: Any = LateReducer(rank, meeting)
    hidden, residual = embedding(), None
    double, names, multiplier = FORMS[form]
    blocks = Blocks(attn_norms=names.attn_norms, mlp_norms=names.mlp_norms)
    for stage in stages:
        layers = {i: double(rank, i, kinds[i], reducer) for i in stage}
        seen: list[Kind] = [kind_of(layers[i], names) if i in stage else "moe-shared" for i in range(len(kinds))]
        assert [seen[i] for i in stage] == [kinds[i] for i in stage]
        for i, plan in layer_plans(wiring, seen, stage, blocks=blocks).items():
            take_apart(layers[i], Wired(names, plan, reducer, beside=beside, multiplier=multiplier))
        for layer in layers.values():
            if form == "bare":
                hidden = layer(torch.arange(TOKENS), hidden)
                continue
            assert hidden.shape == (TOKENS, WIDTH)
            hidden, residual = layer(torch.arange(TOKENS), hidden, residual)
        assert names.whole or isinstance(residual, torch.Tensor), "a stage hands on vLLM's pair"
    return hidden if residual is None or names.whole else hidden + residual, reducer.log


def run(
    wiring: Wiring, kinds: Sequence[Kind], stages: list[range] | None = None, form: str = "stock", beside: bool = False
) -> tuple[torch.Tensor, list[str]]:
    meeting, stages = Meeting(), stages or [range(len(kinds))]
    with ThreadPoolExecutor(RANKS) as ranks:
        jobs = [ranks.submit(run_rank, rank, meeting, wiring, kinds, stages, form, beside) for rank in range(RANKS)]
        (first, log), (second, _) = (job.result(timeout=60) for job in jobs)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    return first, log


def wirings() -> list[Wiring]:
    found = [Wiring("parallel", layers) for layers in ((0, 1, 2, 3, 4), (1, 3))] + [Wiring("standard", (1,))]
    for name in ("farskip", "ladder"):
        for variant in ("full", "attn-only", "mlp-only"):
            for border in ("full", "partial"):
                for layers in ((0, 1, 2, 3, 4), (1, 2), (0, 3)):
                    found += [Wiring(name, layers, variant, border, distance) for distance in (1, 2, 3)]
    return found


@pytest.mark.parametrize(
    "kinds", [MIXED, ("moe-shared", "dense", "dense", "moe", "moe-shared")], ids=["mixed", "others"]
)
@pytest.mark.parametrize("beside", [False, True], ids=["apart", "beside"])
def test_every_wiring_is_computed_as_its_reads_say(kinds, beside):
    for wiring in wirings():
        found, _ = run(wiring, kinds, beside=beside)
        torch.testing.assert_close(found, literal(wiring, kinds), rtol=1e-9, atol=1e-9, msg=str(wiring))


def test_outputs_are_normed_when_their_sums_have_arrived():
    for wiring in wirings()[::3]:
        for stages in (None, [range(2), range(2, 5)]):
            if stages is None or wiring.distance == 1:
                found, _ = run(wiring, MIXED, stages, form="normed")
                expected = literal(wiring, MIXED, blocks=Blocks(**NORMED))
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=str(wiring))


@pytest.mark.parametrize("form", ["whole", "bare"])
def test_layers_that_pass_on_the_whole_stream(form):
    """They are computed by the same plans, also beside layers that stay vLLM's own, whose second value says nothing."""
    _, names, multiplier = FORMS[form]
    blocks = Blocks(attn_norms=names.attn_norms, mlp_norms=names.mlp_norms)
    for wiring in wirings()[1::3]:
        found, _ = run(wiring, MIXED, form=form)
        expected = literal(wiring, MIXED, blocks=blocks, factor=multiplier or 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=str(wiring))


def test_a_layer_whose_config_leaves_its_norms_on_arrival_out():
    layer: Any = NormedLayer(0, 0, "dense", None)
    del layer.post_self_attn_layernorm, layer.post_mlp
    (plan,) = layer_plans(Wiring("parallel", (0,)), ("dense",), range(1), blocks=Blocks(**NORMED)).values()
    take_apart(layer, Wired(FORMS["normed"][1], plan, Reducer(1), multiplier=FACTOR))
    hidden, residual = layer(torch.arange(TOKENS), embedding(), None)
    outputs = sum(read(embedding(), part) @ weight(0, seed_of(0, part)) for part in ("attn", "shared"))
    assert torch.allclose(hidden + residual, embedding() + FACTOR * outputs)


@pytest.mark.parametrize("form", ["stock", "bare"])
@pytest.mark.parametrize("name", DESYNC)
def test_desync_is_computed_on_local_residuals(name, form):
    kinds: tuple[Kind, ...] = ("dense",) * 5
    for layers in ((0, 1, 2, 3, 4), (1, 2, 4), (0, 3)):
        pattern = "-,m" if layers != (0, 3) else "am"
        wiring = Wiring(name, layers, tp_degree=RANKS, reduce=pattern if name == "desync" else "")
        found, log = run(wiring, kinds, form=form)
        expected = literal_desync(wiring, kinds, FORMS[form][2] or 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=str(wiring))
        assert set(log) == {"now"}, "a reduction that Desync keeps has no cover"


def test_pipeline_stages_exchange_a_pair():
    for wiring in wirings():
        if wiring.distance == 1:
            found, _ = run(wiring, MIXED, [range(1), range(1, 3), range(3, 5)])
            torch.testing.assert_close(found, literal(wiring, MIXED), rtol=1e-9, atol=1e-9, msg=str(wiring))
    with pytest.raises(ValueError, match="more than two streams"):
        layer_plans(Wiring("ladder", (0, 1, 2, 3, 4), distance=3), ("moe",) * 5, range(3))


def test_what_overlaps_under_each_wiring():
    moe: tuple[Kind, ...] = ("moe-shared",) * 3
    _, farskip = run(Wiring("farskip", (0, 1, 2)), moe)
    # Attention and shared experts share one sum under the routed experts; the last layer sums all of it at once.
    assert farskip == ["start", "start", "wait", "wait", "start", "start", "wait", "wait", "now"]
    assert run(Wiring("ladder", (0, 1, 2)), moe)[1].count("start") == 4
    assert run(Wiring("parallel", (0, 1, 2)), moe)[1] == ["now"] * 3
    assert run(Wiring("farskip", (0, 1, 2)), ("dense",) * 3)[1] == ["now"] * 3
    assert run(Wiring("standard", ()), moe)[1] == ["now"] * 6, "vLLM's own layers"


def crossing(plans: dict[int, LayerPlan]) -> list[bool]:
    """For each sum that starts, whether it is in flight at an attention: by what the layers land, one after another."""
    in_flight: list[int | None] = []  # numbers of sums; None is one that is complete
    found: list[bool] = []
    for plan in plans.values():
        in_flight = [number for place, number in enumerate(in_flight) if place not in plan.attn]
        for number in in_flight:
            if number is not None:
                found[number] = True
        for n, step in enumerate(plan.steps):
            if n == 1:
                in_flight = [number for place, number in enumerate(in_flight) if place not in plan.mlp]
            if step.then == "start":
                found.append(False)
            if step.then != "collect":
                in_flight.append(len(found) - 1 if step.then == "start" else None)
        in_flight = in_flight if plan.hands_on is None else [None]
    return found


def test_a_plan_says_which_sums_are_in_flight_at_an_attention():
    def said(wiring: Wiring, kinds: Sequence[Kind]) -> list[tuple[str, bool]]:
        plans = layer_plans(wiring, kinds, range(len(kinds)))
        starts = [(step.call, step.crosses) for plan in plans.values() for step in plan.steps if step.then == "start"]
        assert [crosses for _, crosses in starts] == crossing(plans), wiring
        return starts

    for wiring in wirings():
        for kinds in (MIXED, ("dense",) * 5):
            said(wiring, kinds)
    half = [("attn", False), ("mlp", True)]  # the attention's sum under the MLP, the MLP's under the next attention
    assert said(Wiring("ladder", (0, 1, 2)), ("dense",) * 3) == [*half, *half]
    shared = [("shared", False), ("routed", True)]  # the sum of attention and shared experts under the routed ones
    assert said(Wiring("farskip", (0, 1, 2)), ("moe-shared",) * 3) == [*shared, *shared]
    assert said(Wiring("farskip", (0, 1, 2)), ("dense",) * 3) == []
    assert said(Wiring("desync-2x", (0, 1, 2), tp_degree=2), ("dense",) * 3) == []


def test_slots_repeat_from_layer_to_layer():
    """A compiler gets the same piece for each layer between the first and the last."""
    for name, kind in (("ladder", "dense"), ("farskip", "moe-shared")):
        plans = layer_plans(Wiring(name, tuple(range(6))), (kind,) * 6, range(6))
        assert len({tuple(step.slot for step in plans[i].steps) for i in range(1, 5)}) == 1
        assert {step.slot for plan in plans.values() for step in plan.steps} == {0, 1}


def test_layers_that_are_not_rewired_stay_vllms_own():
    for kinds in (MIXED, ("dense",) * 5):
        assert set(layer_plans(Wiring("farskip", (3,)), kinds, range(5))) == {3}
        assert set(layer_plans(Wiring("ladder", (3,)), kinds, range(5))) == {2, 3}, "its sum is read later"


def test_experts_that_sum_by_themselves_are_refused():
    layer = Layer(0, 0, "moe", None)
    (plan,) = layer_plans(Wiring("ladder", (0,)), ("moe",), range(1)).values()
    take_apart(layer, Wired(NAMES, plan, Reducer(1)))
    runner: Any = layer.mlp.experts
    assert torch.equal(runner._maybe_reduce_final_output(torch.ones(1, 4), 3), torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="sums over the ranks itself"):
        runner._maybe_reduce_final_output(torch.ones(1, 4), None, True)


def test_what_a_loop_names_and_the_scale_that_a_layer_leaves_out():
    class Scaled(Attention):
        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, scale: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            assert scale is None
            return super().forward(positions, hidden_states)

    layer = Layer(0, 0, "dense", None)
    layer.self_attn = Scaled(0, seed_of(0, "attn"), None)
    (plan,) = layer_plans(Wiring("parallel", (0,)), ("dense",), range(1)).values()
    take_apart(layer, Wired(replace(NAMES, unscaled=True), plan, Reducer(1)))
    rewired: Any = layer
    hidden, residual = rewired(torch.arange(TOKENS), embedding(), None, t_cond=None)
    outputs = sum(read(embedding(), part) @ weight(0, seed_of(0, part)) for part in ("attn", "shared"))
    assert torch.allclose(hidden + residual, embedding() + outputs)
    with pytest.raises(RuntimeError, match="no condition of time"):
        rewired(torch.arange(TOKENS), embedding(), None, t_cond=torch.ones(1))


@pytest.mark.parametrize("fills", [False, True])
def test_a_layer_with_linear_attention_and_a_loop_that_names_its_arguments(fills):
    class Named(Attention):
        def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(positions, hidden_states)

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out_proj = Projection(0, seed_of(0, "attn"), None)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.out_proj(hidden_states)

    class Filling(Linear):
        def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            output[:] = self.out_proj(hidden_states)

    names, x = replace(NAMES, linear="linear_attn"), embedding()
    expected = x + sum(read(x, part) @ weight(0, seed_of(0, part)) for part in ("attn", "shared"))
    (plan,) = layer_plans(Wiring("parallel", (0,)), ("dense",), range(1)).values()
    for attention in (Filling() if fills else Linear(), None):
        layer: Any = Layer(0, 0, "dense", None)
        if attention is None:
            layer.self_attn = Named(0, seed_of(0, "attn"), None)
        else:
            del layer.self_attn
            layer.linear_attn = attention
        take_apart(layer, Wired(names, plan, Reducer(1)))
        hidden, residual = layer(positions=torch.arange(TOKENS), hidden_states=embedding(), residual=None)
        assert torch.allclose(hidden + residual, expected)
        own = layer.self_attn.o_proj if attention is None else attention.out_proj
        assert not own.reduce_results, "the plugin sums the output"
    layer.layer_scale = True
    with pytest.raises(ValueError, match="multiply their outputs"):
        take_apart(layer, Wired(names, plan, Reducer(1)))


def test_features_that_vllm_adds_behind_a_layer_are_never_lost():
    for name, first in (("parallel", 0), ("ladder", 1), ("farskip", 1)):
        plans = layer_plans(Wiring(name, tuple(range(first, 5))), MIXED, range(5))
        check_handed_on(plans, 0)
        with pytest.raises(ValueError, match="adds image features to the output of layer"):
            check_handed_on(plans, 2)
    check_handed_on(layer_plans(Wiring("ladder", (3, 4)), MIXED, range(5)), 2)


def test_a_gate_multiplies_what_the_output_projection_reads():
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return 3 * x, None

    layer, x = Layer(0, 0, "dense", None), norm(embedding())
    gate_attention(layer.self_attn, Gate())
    layer.self_attn.o_proj.reduce_results = False
    found = layer.self_attn(positions=torch.arange(TOKENS), hidden_states=x)
    assert torch.allclose(found, (x * torch.sigmoid(3 * x)) @ weight(0, seed_of(0, "attn")))
    assert torch.equal(layer.self_attn(torch.arange(TOKENS), x), found)


def test_every_kind_of_layer_is_known():
    for kind in get_args(Kind):
        assert kind_of(Layer(0, 0, kind, None), NAMES) == kind


SCALE, GIVEN = 0.7, torch.linspace(-1, 1, TOKENS * WIDTH, dtype=torch.float64).view(TOKENS, WIDTH)
FEATURED = VllmNames(
    whole=True,
    moe=("elsewhere", "experts"),
    attn_norms=("norm", "after_attn"),
    mlp_norms=("norm", "after_mlp"),
    beside=("norm", "norm", "norm"),
    router="norm",
    inputs=("norm", "norm", "norm"),
    scale="factor",
)


class FeaturedLayer(Layer):
    """A decoder layer with experts beside its MLP, features of each token and a factor of the stream."""

    def __init__(self, rank: int, index: int, kind: Kind, reducer: Any) -> None:
        super().__init__(rank, index, "dense", reducer)
        self.norm, self.factor = Norm(), torch.tensor([SCALE], dtype=torch.float64)
        self.after_attn, self.after_mlp = Norm(AFTER["attn"]), Norm(AFTER["mlp"])
        self.experts = None if kind == "dense" else BesideRunner(rank, seed_of(index, "routed"), reducer, None)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: Any, per_layer_input: Any = None) -> Any:
        hidden = hidden + self.after_attn(self.self_attn(positions, norm(hidden)))
        out = self.mlp(norm(hidden))
        if self.experts is not None:
            out = norm(out) + norm(self.experts(norm(hidden), norm(hidden)))
        hidden = hidden + self.after_mlp(out)
        return (hidden + feature(hidden)) * SCALE, None


class BesideRunner(Runner):
    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert torch.equal(logits, x), "the router and the experts read the same stream, through one norm here"
        return super().forward(x)


def feature(stream: torch.Tensor) -> torch.Tensor:
    return norm(norm(torch.nn.functional.gelu(norm(stream), approximate="tanh") * GIVEN))


def featured(wiring: Wiring, kinds: Sequence[Kind], blocks: Blocks) -> torch.Tensor:
    """The final stream, from the sets that each read includes: features are of what the next attention reads."""
    reads, outputs, features = reads_of(wiring, kinds, blocks), {}, []

    def stream(place: Read, layer: int) -> torch.Tensor:
        own = [(output.layer, outputs[output]) for output in sorted(reads[place])] + list(enumerate(features))
        return SCALE**layer * embedding() + sum(SCALE ** (layer - i) * value for i, value in own)

    def summed(x: torch.Tensor, i: int, part: str) -> torch.Tensor:
        return sum((x @ weight(rank, seed_of(i, part)) for rank in range(RANKS)), torch.zeros(()))

    for i, kind in enumerate(kinds):
        outputs[Output(i, "attn")] = norm(summed(norm(stream(Read(i, "attn"), i)), i, "attn"), AFTER["attn"])
        x = norm(stream(Read(i, "mlp"), i))
        parts = [summed(x, i, part) for part in MLP_PARTS[kind]]
        outputs |= dict.fromkeys((Output(i, part) for part in MLP_PARTS[kind]), torch.zeros(()))
        both = parts[0] if kind == "dense" else norm(parts[0]) + norm(parts[1])
        outputs[Output(i, "shared")] = norm(both, AFTER["mlp"])
        last = i + 1 == len(kinds)
        features.append(feature(stream(Read(i + 1, "norm" if last else "attn"), i)))
    return stream(Read(len(kinds), "norm"), len(kinds))


def test_layers_with_experts_beside_their_mlp_features_of_tokens_and_a_factor():
    """Sums in flight get the factors of all layers that they pass, and the two parts of an MLP share a sum."""

    def run_one(rank: int, meeting: Meeting, wiring: Wiring) -> Any:
        reducer: Any = LateReducer(rank, meeting)
        layers = [FeaturedLayer(rank, i, kind, reducer) for i, kind in enumerate(kinds)]
        assert [kind_of(layer, FEATURED) for layer in layers] == list(kinds)
        plans = layer_plans(wiring, kinds, range(len(kinds)), blocks=blocks)
        ahead = read_ahead(plans)
        for i, plan in plans.items():
            take_apart(layers[i], Wired(FEATURED, plan, reducer, ahead=ahead.get(i, ())))
        hidden, residual = embedding(), None
        for layer in layers:
            hidden, residual = layer(torch.arange(TOKENS), hidden, residual, per_layer_input=GIVEN)
        return hidden

    kinds: tuple[Kind, ...] = ("moe-shared", "dense", "moe-shared", "moe-shared", "dense")
    blocks = Blocks(attn_norms=FEATURED.attn_norms, mlp_norms=FEATURED.mlp_norms)
    for wiring in [*wirings()[2::3], Wiring("standard", ())]:
        meeting = Meeting()
        with ThreadPoolExecutor(RANKS) as ranks:
            found = [ranks.submit(run_one, rank, meeting, wiring) for rank in range(RANKS)]
            expected = featured(wiring, kinds, blocks)
            for job in found:
                torch.testing.assert_close(job.result(60), expected, rtol=1e-9, atol=1e-9, msg=str(wiring))


def test_experts_under_a_name_that_the_plugin_does_not_know_are_refused():
    layer = FeaturedLayer(0, 0, "moe-shared", None)
    with pytest.raises(ValueError, match="under a name"):
        kind_of(layer, replace(FEATURED, moe=("elsewhere",)))
