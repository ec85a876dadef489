"""Overlapped expert parallelism is the blocking one to the last bit, leaks nothing, and runs in the paper's order."""

import gc
import random
import time
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from divided import losses, sharded
from file_buffers import opener
from late import late_collectives
from ranks import in_group
from representatives import by_day_and_night
from rewired import backward
from torch.multiprocessing.reductions import StorageWeakRef

from fcsd.errors import ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers, unwired, wire
from fcsd.models.fused import FusedLatentAttention
from fcsd.models.wiring import WiredLayer, Wiring
from fcsd.parallel.deferred import Exchange
from fcsd.parallel.expert.dispatcher import Dispatcher
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.expert.hierarchical import hierarchical
from fcsd.parallel.expert.levels import one_level
from fcsd.parallel.overlap import overlap
from fcsd.parallel.transports.copies import CopiesTransport

MOE = [a for a in tiny.CONFIGS if ARCHS[a].autoep is not None] + [*tiny.INSIDE]
DAILY, NIGHTLY = (case.values[0] for case in by_day_and_night("moe", "layer", of=MOE))
ALL = (0, 1, 2, 3)
FARSKIP = Wiring("farskip", ALL)
WIRINGS = [
    FARSKIP,
    Wiring("farskip", (2, 3)),
    Wiring("farskip", ALL, variant="attn-only"),
    Wiring("farskip", ALL, variant="mlp-only"),
    Wiring("ladder", ALL),
    Wiring("ladder", (1, 3)),
    Wiring("ladder", ALL, variant="attn-only"),
    Wiring("parallel", ALL),
    Wiring("standard", ()),
]
# Of them, one for each schedule (FARSKIP, attn-only, mlp-only and standard), and ladder.
SCHEDULES = [WIRINGS[place] for place in (0, 2, 3, 4, 8)]


def _run(model, batches, **forward):
    """Logits and gradients of every parameter after one backward pass per batch."""
    model.zero_grad()
    logits = []
    for ids in batches:
        out = model(ids, labels=ids, use_cache=False, **forward)
        backward(out.loss)
        logits.append(out.logits.detach().clone())
    return logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _difference(one, other) -> str | None:
    if not all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)):
        return "logits"
    if one[1].keys() != other[1].keys():
        return f"gradients of {sorted(one[1].keys() ^ other[1].keys())}"
    return next((name for name in one[1] if not torch.equal(one[1][name], other[1][name])), None)


def _compare(model, wiring, batches, case, problems, modes=("on", "eager-sync"), **options):
    """Overlapped and eager-sync against blocking, collectives arriving as late as they may."""
    overlap(model, wiring, "off", **options)
    blocking = _run(model, batches)
    for mode in modes:
        overlap(model, wiring, mode, **options)
        with late_collectives():
            difference = _difference(blocking, _run(model, batches))
        if difference:
            problems.append(f"{case} {wiring.name} {wiring.variant} {wiring.layers} {mode}: {difference}")


def _every_wiring(rank: int, archs: list[str]) -> list[str]:
    problems: list[str] = []
    batch = tiny.tokens(seed=10 + rank, length=8 + 4 * rank)  # ranks hold different numbers of tokens
    for arch in archs:
        model = sharded(arch)
        several = {"deepseek_v2": WIRINGS, "qwen3_moe": SCHEDULES, "flex_olmo": SCHEDULES}
        if arch in several:
            for wiring in several[arch]:
                _compare(model, wiring, [batch], arch, problems)
        else:  # when eager-sync awaits does not depend on the architecture
            _compare(model, FARSKIP, [batch], arch, problems, modes=("on",))
    return problems


def _every_situation(rank: int, arch: str, wirings: list[Wiring]) -> list[str]:
    """Accumulation, one token, recompute, no token for most ranks, top-1."""
    problems: list[str] = []
    batches = [tiny.tokens(seed=10 * i + rank, length=6 + 4 * rank + i) for i in range(3)]
    model = sharded(arch)
    _compare(model, FARSKIP, batches, "accumulated", problems)
    _compare(model, FARSKIP, [tiny.tokens(1, 1, seed=rank)], "one token", problems)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for wiring in wirings:
        _compare(model, wiring, batches[:1], "recomputed", problems)
    model.gradient_checkpointing_disable()
    for name, parameter in model.named_parameters():
        if "router.gate.weight" in name:
            parameter.data.zero_()  # all scores alike: every token goes to the first experts, all on rank 0
    _compare(model, FARSKIP, batches[:1], "all on rank 0", problems)
    _compare(sharded(arch, num_experts_per_tok=1), FARSKIP, batches[:1], "top-1", problems)
    return problems


def _by_copies(rank: int, folder: str, wirings: list[Wiring], recomputed: list[Wiring]) -> list[str]:
    """Rows copied into the peers' memory; the second batch does not fit the buffers of the first."""
    problems: list[str] = []
    model = sharded("deepseek_v2")
    transport = CopiesTransport(opener(folder))
    batches = [tiny.tokens(seed=rank, length=length) for length in (6, 40, 40)]
    for wiring in wirings:
        _compare(model, wiring, batches, "by copies", problems, transport=transport)
    few = [tiny.tokens(batch=1, seed=rank, length=2)]
    overlap(model, FARSKIP, fused=True)
    fused = _run(model, few)
    overlap(model, FARSKIP, fused=True, transport=transport)
    if difference := _difference(fused, _run(model, few)):
        problems.append(f"fused, by copies: {difference}")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for wiring in recomputed:
        _compare(model, wiring, batches[1:], "recomputed, by copies", problems, transport=transport)
    return problems


def _fused(rank: int) -> list[str]:
    """One kernel for each norm and move of rows, scores applied after the experts and before: torch's, in any mode."""
    problems = []
    ids = tiny.tokens(batch=1, seed=rank, length=2)  # the interpreter runs the kernels row by row
    for arch in ("deepseek_v2", "llama4_text"):
        model = sharded(arch)
        results = []
        for fused in (False, True):
            overlap(model, FARSKIP, fused=fused)
            if (arch == "deepseek_v2" and fused) != any(
                isinstance(part, FusedLatentAttention) for part in model.modules()
            ):
                problems.append(f"{arch}, fused {fused}: the kernels of latent attention")
            results.append(_run(model, [ids]))
        for wiring in (WIRINGS[-1], FARSKIP):
            _compare(model, wiring, [ids], f"{arch} fused", problems, fused=True)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if difference := _difference(results[1], _run(model, [ids])):
            problems.append(f"{arch} recomputed: {difference}")
        for what, by_torch, by_kernel in zip(("logits", "gradients"), *results, strict=True):
            try:
                torch.testing.assert_close(by_kernel, by_torch, rtol=1e-4, atol=1e-6)
            except AssertionError as error:
                problems.append(f"{arch} {what}: {error}")
    return problems


@contextmanager
def _watched(see):
    """Call ``see(event, exchange, rows, received)`` at every launch and landing."""
    launch, land = Exchange.launch, Exchange.land

    def watched_launch(self, rows, *args):
        see("launch", self, rows, None)
        return launch(self, rows, *args)

    def watched_land(self):
        _, received, rows = self.in_flight
        see("land", self, rows, received)
        del received, rows
        return land(self)

    Exchange.launch, Exchange.land = watched_launch, watched_land
    try:
        yield
    finally:
        Exchange.launch, Exchange.land = launch, land


def _executed(rank: int, wiring: Wiring, modules: dict[str, str], recompute: bool) -> tuple[list[str], list[str]]:
    """What ran in forward and in backward, in order: collectives and the named modules of each layer."""
    model = sharded("deepseek_v2", first_k_dense_replace=0)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    overlap(model, wiring)
    events: list[str] = []
    for k, layer in enumerate(decoder_layers(model)):
        for path, name in modules.items():

            def note(module, args, out, label=f"{name}{k}"):
                events.append(label)
                out.register_hook(lambda grad: events.append(label))

            layer.get_submodule(path).register_forward_hook(note)
        # As ZeRO's hooks: they run with the node that accumulates the gradient.
        layer.get_parameter("mlp.experts.w1").register_post_accumulate_grad_hook(
            lambda _, k=k: events.append(f"gradient experts{k}")
        )
    note_exchange = lambda event, exchange, *_: events.append(f"{event} {exchange.name}{exchange.layer}")  # noqa: E731
    ids = tiny.tokens(seed=rank)
    with _watched(note_exchange):
        loss = model(ids, labels=ids, use_cache=False).loss
        forward = list(events)
        events.clear()
        backward(loss)
    return forward, events


MODULES = {
    "self_attn.q_proj": "q",
    "self_attn.o_proj": "o",
    "mlp.router.gate": "gate",
    "mlp.experts": "experts",
    "mlp.shared_experts": "shared",
}


def _between(events: list[str], first: str, last: str) -> list[str]:
    start = events.index(first)
    return events[start : events.index(last, start + 1) + 1]


def _alive_buffers(rank: int, recompute: bool, dispatcher: Dispatcher = flat) -> list[str]:
    """Buffers that outlive their use: still alive at the second launch after they landed, or after the pass."""
    model = sharded("deepseek_v2")
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    overlap(model, FARSKIP, dispatcher=dispatcher)
    landed: list[tuple[str, StorageWeakRef]] = []
    launches, leaks = 0, []

    def see(event, exchange, rows, received):
        nonlocal launches
        if event == "launch":
            launches += 1
            leaks.extend(f"{what} at launch {launches}" for at, what, ref in landed if at + 1 < launches and alive(ref))
        else:
            for what, tensor in (("rows", rows), ("received", received)):
                label = f"{what} of {exchange.name} {exchange.layer}"
                landed.append((launches, label, StorageWeakRef(tensor.untyped_storage())))

    def alive(ref):
        # gloo's thread lets go of a collective's tensors a moment after it is awaited; a leak stays
        until = time.monotonic() + 10
        while not ref.expired() and time.monotonic() < until:
            time.sleep(0.001)
        return not ref.expired()

    ids = tiny.tokens(seed=rank)
    gc.collect()
    gc.disable()  # buffers must go by themselves, not when a cycle happens to be found
    try:
        with _watched(see):
            loss = model(ids, labels=ids, use_cache=False).loss
            leaks.extend(f"{what} after forward" for _, what, ref in landed if alive(ref))
            backward(loss)
            leaks.extend(f"{what} after backward" for _, what, ref in landed if alive(ref))
    finally:
        gc.enable()
    assert launches == (18 if recompute else 12)  # three MoE layers, dispatch and combine, each pass
    return leaks


def _states(rank: int) -> bool:
    """Captured hidden states are the full streams, of the blocking parts' bits."""
    model = sharded("deepseek_v2").eval()
    ids = tiny.tokens(seed=rank)
    states = []
    for mode in ("off", "on"):
        overlap(model, FARSKIP, mode)
        with torch.no_grad():
            states.append(model(ids, output_hidden_states=True, use_cache=False).hidden_states)
    overlap(model, FARSKIP, "on")
    wire(model, unwired())  # the way back
    assert not any(isinstance(layer, WiredLayer) for layer in decoder_layers(model))
    return len(states[0]) == 5 and all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def _train(rank: int, steps: int) -> list[str]:
    """Loss curves of DeepSpeed engines, overlapped against blocking."""
    problems = []
    for stage, recompute in ((1, False), (2, True)):
        curves = []
        for mode in ("off", "on"):
            seeds = [10 * rank + step % 4 for step in range(2 * steps)]
            curves.append(losses(stage, partial(overlap, wiring=FARSKIP, mode=mode), seeds, recompute))
        if curves[0] != curves[1]:
            step = next(i for i, (a, b) in enumerate(zip(*curves, strict=True)) if a != b)
            problems.append(f"ZeRO-{stage} differs at micro-batch {step}")
        if curves[0][-1] > curves[0][0]:
            problems.append(f"ZeRO-{stage} does not learn: {curves[0][0]} -> {curves[0][-1]}")
    return problems


def _two_ranks(rank: int, folder: str) -> dict[str, Any]:
    random.seed(rank)
    return {
        "wirings": _every_wiring(rank, DAILY),
        "situations": _every_situation(rank, "deepseek_v2", SCHEDULES),
        "situations without shared experts": _every_situation(rank, "qwen3_moe", WIRINGS[:1]),
        "by copies": _by_copies(rank, folder, [SCHEDULES[place] for place in (0, 1, 4)], [FARSKIP]),
        "buffers": _alive_buffers(rank, recompute=False),
        "buffers recomputed": _alive_buffers(rank, recompute=True),
        "buffers deduplicated": _alive_buffers(rank, recompute=True, dispatcher=hierarchical(one_level(2))),
        "order": _executed(rank, FARSKIP, MODULES, recompute=False),
        "order recomputed": _executed(rank, FARSKIP, MODULES, recompute=True),
        "fused": _fused(rank),
        "hidden states": _states(rank),
        "training": _train(rank, 8),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks found; starting them costs more than most of what they do."""
    return in_group(2, _two_ranks, str(tmp_path_factory.mktemp("windows")))


EQUAL = ("wirings", "situations", "situations without shared experts", "by copies", "training", "fused")


@pytest.mark.parametrize("what", EQUAL)
def test_overlapped_is_blocking_to_the_last_bit(two_ranks, what):
    assert [problem for rank in two_ranks for problem in rank[what]] == []


@pytest.mark.parametrize("world", [1, 4])
def test_on_one_rank_and_on_four(world):
    assert [p for rank in in_group(world, _every_situation, "deepseek_v2", WIRINGS[:1]) for p in rank] == []


def _other_cases(rank: int, folder: str) -> list[str]:
    random.seed(rank)
    every = _every_situation(rank, "deepseek_v2", WIRINGS)
    return _every_wiring(rank, NIGHTLY) + every + _by_copies(rank, folder, SCHEDULES, WIRINGS[:3])


@pytest.mark.nightly
def test_other_families_and_every_wiring_recomputed_and_by_copies(tmp_path):
    assert [problem for rank in in_group(2, _other_cases, str(tmp_path)) for problem in rank] == []


@pytest.mark.nightly
def test_two_hundred_steps():
    assert [p for rank in in_group(2, _train, 200) for p in rank] == []


@pytest.mark.parametrize("what", ["buffers", "buffers recomputed", "buffers deduplicated"])
def test_no_buffer_outlives_its_use(two_ranks, what):
    assert [leak for rank in two_ranks for leak in rank[what]] == []


def test_collectives_run_in_the_order_of_the_paper(two_ranks):
    for rank in two_ranks:
        forward, everything = rank["order"]
        backward = [event for event in everything if not event.startswith("gradient")]
        # FarSkip Figure 9: dispatch under core attention, combine under shared experts and the next q, k, v.
        assert _between(forward, "launch dispatch1", "land combine1") == [
            *("launch dispatch1", "o1", "land dispatch1", "experts1"),
            *("launch combine1", "shared1", "q2", "land combine1"),
        ]
        # Figure 10: combine's gradient under shared experts and core attention, dispatch's under q, k, v (and under
        # the gate, whose gradient comes from combine's weights).
        assert _between(backward, "launch combine2", "launch combine1") == [
            *("launch combine2", "shared2", "o2", "land combine2", "experts2"),
            *("launch dispatch2", "gate2", "q2", "land dispatch2", "launch combine1"),
        ]


def test_a_combine_pending_at_a_recompute_boundary(two_ranks):
    for rank in two_ranks:
        forward, backward = rank["order recomputed"]
        assert forward == rank["order"][0]  # it stays in flight into the next layer's checkpoint
        # Recomputed, it is awaited where its layer ends, and both collectives have their cover again.
        assert _between(backward, "q2", "land combine2") == [
            *("q2", "gate2", "launch dispatch2", "o2", "land dispatch2", "experts2"),
            *("launch combine2", "shared2", "land combine2"),
        ]


def test_hooks_on_the_experts_gradients_run_once_their_inputs_gradients_are_sent(two_ranks):
    for rank in two_ranks:
        _, backward = rank["order"]
        for k in range(4):
            place = _between(backward, f"launch dispatch{k}", f"land dispatch{k}").index
            assert place(f"gradient experts{k}") > 0


def test_a_recompute_leaves_the_experts_gradients_where_they_were(two_ranks):
    for rank in two_ranks:
        _, backward = rank["order recomputed"]
        for k in range(3, 0, -1):
            sent = len(backward) - 1 - backward[::-1].index(f"launch dispatch{k}")
            assert sent < backward.index(f"gradient experts{k}") < backward.index(f"launch dispatch{k - 1}")


def test_captured_hidden_states_are_full_streams(two_ranks):
    assert all(rank["hidden states"] for rank in two_ranks)


def test_what_cannot_overlap_says_why():
    with pytest.raises(ConfigError, match="desync"):
        overlap(tiny.model("llama"), Wiring("desync-2x", ALL, tp_degree=2))
    with pytest.raises(ConfigError, match="distance 2"):
        overlap(tiny.model("qwen3_moe"), Wiring("farskip", ALL, distance=2))


def test_weights_that_zero_3_has_divided_are_refused() -> None:
    model = tiny.model(DAILY[0])
    next(model.parameters()).ds_id = 0  # DeepSpeed's mark
    with pytest.raises(ConfigError, match="ZeRO-3 has divided"):
        overlap(model, FARSKIP)
