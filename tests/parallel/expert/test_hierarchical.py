"""Deduplicated dispatch computes what the flat one does, and is the same to the last bit blocking and overlapped."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from blocks import Block, interleaved
from divided import losses, sharded
from file_buffers import opener
from late import late_collectives
from ranks import in_group
from rewired import backward
from studies.formats.directions import parse_formats
from torch import Tensor

from fcsd.models.wiring import Wiring
from fcsd.parallel.deferred import Deferred, Exchange
from fcsd.parallel.expert.dispatcher import Dispatcher, Mode, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.expert.hierarchical import hierarchical
from fcsd.parallel.expert.levels import Levels, one_level, two_levels
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.overlap import overlap
from fcsd.parallel.quantised import Quantiser
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.transport import Transport, all_to_all

EXPERTS, TOP_K, HIDDEN = 8, 3, 10
FARSKIP = Wiring("farskip", (0, 1, 2, 3))
Results = list[Tensor]  # the output, and the gradients of the input, the router and the experts


def arrangements() -> list[Levels]:
    world = dist.get_world_size()
    if world == 2:
        return [one_level(world)]
    return [one_level(world), two_levels(world, 2)]


def through(dispatcher: Dispatcher, block: Block, x: Tensor, transfer: Transfer) -> Tensor:
    handle = dispatcher(block, 0, x, transfer).dispatch(None)
    if transfer.mode == "off":  # the blocking parts forward nothing between the steps
        return handle.combine(None).land()
    return handle.forward().combine(None).forward().land()


def taken(block: Block, make: Dispatcher | None, transfer: Transfer | None, dtype: torch.dtype, tokens: int) -> Results:
    """The results in ``dtype``, through a dispatcher or with no row moved; gradients of weights are sums over ranks."""
    x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(block.rank), dtype=torch.float64)
    leaves = [leaf.to(dtype, copy=True).requires_grad_() for leaf in (x, block.gate, block.scale)]
    block = replace(block, gate=leaves[1], scale=leaves[2])
    moved = make is not None and transfer is not None
    y = through(make, block, leaves[0], transfer) if moved else block.without_moving(leaves[0])
    (y.double() * torch.arange(1.0, HIDDEN + 1)).square().sum().backward()
    x_grad, *grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for grad in grads:
        dist.all_reduce(grad)
    return [y.detach(), x_grad, *grads]


def distance(found: Results, expected: Results) -> float:
    """The largest distance of two tensors, relative to the norm of the expected one."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs)


def blocks(rank: int) -> Iterator[tuple[str, Block, int]]:
    """Blocks by name, with the number of this rank's tokens."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    gate = torch.randn(HIDDEN, EXPERTS, generator=generator, dtype=torch.float64)
    scale = torch.rand(EXPERTS, generator=generator, dtype=torch.float64) + 0.5
    block = Block(Placement(EXPERTS, world), dist.group.WORLD, rank, False, gate, scale, TOP_K)
    yield "weights on the outputs", block, 3 + 2 * rank
    yield "weights on the inputs", replace(block, prescaled=True), 3 + 2 * rank
    yield "another placement", replace(block, placement=interleaved(EXPERTS, world)), 3 + 2 * rank
    yield "every token on the first experts", replace(block, gate=0 * gate), 4
    yield "one token a rank", block, 1


def wrong_blocks(rank: int) -> list[str]:
    """Cases in which a dispatcher differs from the computation with no row moved, or one of its modes from another."""
    problems = []
    for name, block, tokens in blocks(rank):
        for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            expected = taken(block, None, None, dtype, tokens)
            direct = taken(block, flat, Transfer(mode="off"), dtype, tokens)
            for levels in arrangements():
                make = hierarchical(levels)
                by_mode = [taken(block, make, Transfer(mode=mode), dtype, tokens) for mode in ("off", "eager-sync")]
                with late_collectives():
                    by_mode.append(taken(block, make, Transfer(), dtype, tokens))
                case = f"{name}, {levels}, {dtype}"
                if not all(torch.equal(a, b) for other in by_mode[1:] for a, b in zip(by_mode[0], other, strict=True)):
                    problems.append(f"{case}: the modes differ")
                for what, held in (("no dispatcher", expected), ("flat", direct)):
                    if distance(by_mode[0], held) > most:
                        problems.append(f"{case}: {distance(by_mode[0], held)} from {what}")
                # Interpreted kernels are slow. One level of two ranks and two levels of four ranks use all of them.
                if dtype == torch.float32 and levels.depth == dist.get_world_size() // 2:
                    fused = taken(block, make, Transfer(fused=True), dtype, tokens)
                    if distance(fused, by_mode[0]) > 1e-6:
                        problems.append(f"{case}, fused: {distance(fused, by_mode[0])}")
    return problems


def worse_in_bf16(rank: int) -> list[float]:
    """The error of each arrangement in bf16 against fp64, divided by that of the flat dispatcher."""
    _, block, _ = next(blocks(rank))
    rounded = replace(block, gate=block.gate.bfloat16().double(), scale=block.scale.bfloat16().double())
    exact = taken(rounded, None, None, torch.float64, 64)[0]
    makes = [flat, *map(hierarchical, arrangements())]
    errors = [distance([taken(rounded, make, Transfer(), torch.bfloat16, 64)[0]], [exact]) for make in makes]
    return [error / errors[0] for error in errors[1:]]


def step(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits, and the gradients of all parameters, computed in a thread as on CUDA."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    backward(out.loss)
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def wrong_models(rank: int, folder: str) -> list[str]:
    """Whole models: overlapped against blocking, with and without recompute, by copies, and against the flat one."""
    problems = []
    ids = tiny.tokens(seed=rank, length=8 + 4 * rank)
    copies = CopiesTransport(opener(folder))
    cases = [("deepseek_v2", {"num_experts_per_tok": 3}), ("qwen3_moe", {}), ("llama4_text", {})]
    ways: list[tuple[Mode, Transport]] = [("on", all_to_all), ("on", copies), ("eager-sync", all_to_all)]
    for arch, changes in cases if dist.get_world_size() == 2 else cases[:1]:
        model = sharded(arch, **changes)
        overlap(model, FARSKIP, "off")
        direct = step(model, ids)
        for levels in arrangements():
            make = hierarchical(levels)
            for recompute in (False, True) if arch == "deepseek_v2" else (False,):
                if recompute:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                overlap(model, FARSKIP, "off", dispatcher=make)
                blocking = step(model, ids)
                if distance(blocking, direct) > 1e-6:
                    problems.append(f"{arch} {levels}: {distance(blocking, direct)} from the flat dispatcher")
                for mode, transport in ways[:2] if recompute else ways:
                    overlap(model, FARSKIP, mode, transport=transport, dispatcher=make)
                    with late_collectives():
                        overlapped = step(model, ids)
                    if not all(torch.equal(a, b) for a, b in zip(blocking, overlapped, strict=True)):
                        problems.append(f"{arch} {levels} {mode} recompute {recompute} {transport}: not blocking")
                model.gradient_checkpointing_disable()
    return problems


def wrong_wires(rank: int) -> list[str]:
    """Whole models with quantised communication: overlapped against blocking, and whether any row is rounded."""
    problems = []
    ids = tiny.tokens(seed=rank, length=8 + 4 * rank)
    model = sharded("qwen3_moe")
    for levels in arrangements():
        make, found = hierarchical(levels), []
        for formats in (None, "combine=int8:g64,dispatch_grad=int6:g16", "int8:g64"):
            quantiser = None if formats is None else Quantiser(parse_formats(formats))
            overlap(model, FARSKIP, "off", dispatcher=make, quantiser=quantiser)
            found.append(step(model, ids))
            overlap(model, FARSKIP, dispatcher=make, quantiser=quantiser)
            with late_collectives():
                overlapped = step(model, ids)
            if not all(torch.equal(a, b) for a, b in zip(found[-1], overlapped, strict=True)):
                problems.append(f"{levels} {formats}: not blocking")
        apart = [distance(one, found[0]) for one in found[1:]]
        if not min(apart) > 1e-5 or apart[0] == apart[1]:
            problems.append(f"{levels}: rounded results are {apart} from those of no format")
    return problems


def rounded_exchanges(rank: int) -> list[tuple[str, bool, bool]]:
    """The exchanges of a pass over two levels, in order: name, and whether rows and gradients are rounded in them."""
    found: list[tuple[str, bool, bool]] = []

    class Watched(Transfer):
        def send(self, rows: Tensor, exchange: Exchange, awaited_at: int | None) -> Deferred:
            found.append((exchange.name, exchange.codec is not None, exchange.back_codec is not None))
            return super().send(rows, exchange, awaited_at)

    _, block, _ = next(blocks(rank))
    gate = torch.randn(16, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(rank))
    transfer = Watched(mode="off", quantiser=Quantiser(parse_formats("int8:g16")))
    through(hierarchical(two_levels(4, 2)), replace(block, gate=gate.float(), scale=block.scale.float()), x, transfer)
    return found


def wrong_training(rank: int) -> list[str]:
    """Losses of DeepSpeed engines, overlapped against blocking and against the flat dispatcher."""
    problems = []
    levels = arrangements()[-1]
    for stage in (1, 2):
        curves = []
        cases: list[tuple[Mode, Dispatcher]] = [("off", hierarchical(levels)), ("on", hierarchical(levels))]
        for mode, make in [*cases, ("off", flat)][: 4 - stage]:
            seeds = [10 * rank + number % 2 for number in range(6)]
            curves.append(losses(stage, partial(overlap, wiring=FARSKIP, mode=mode, dispatcher=make), seeds))
        if curves[0] != curves[1]:
            problems.append(f"ZeRO-{stage}: overlapped {curves[1]}, blocking {curves[0]}")
        if curves[0] != pytest.approx(curves[-1], rel=1e-5):
            problems.append(f"ZeRO-{stage}: deduplicated {curves[0]}, flat {curves[-1]}")
    return problems


def found_on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    random.seed(rank)
    return {
        "blocks": wrong_blocks(rank),
        "bf16": worse_in_bf16(rank),
        "models": wrong_models(rank, folder) + wrong_wires(rank),
        "rounded": rounded_exchanges(rank) if dist.get_world_size() == 4 else None,
        "training": wrong_training(rank) if dist.get_world_size() == 2 else [],
    }


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 4])
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    return in_group(request.param, found_on_a_rank, str(tmp_path_factory.mktemp("buffers")))


@pytest.mark.parametrize("what", ["blocks", "models", "training"])
def test_deduplicated_is_flat_and_overlapped_is_blocking(ranks: list[dict[str, Any]], what: str) -> None:
    assert [problem for rank in ranks for problem in rank[what]] == []


def test_rows_are_rounded_between_nodes_alone(ranks: list[dict[str, Any]]) -> None:
    """Each row once on its way: at the outer level of dispatch, which is the first, and of combine, the last."""
    inside, between = (False, False), (True, True)
    once = [("dispatch", *between), ("dispatch", *inside), ("combine", *inside), ("combine", *between)]
    assert [rank["rounded"] for rank in ranks] == [once if len(ranks) == 4 else None] * len(ranks)


def test_more_roundings_cost_little(ranks: list[dict[str, Any]]) -> None:
    assert max(ratio for rank in ranks for ratio in rank["bf16"]) < 1.5


def wrong_on_eight(rank: int) -> list[str]:
    """Levels in which the results of eight ranks differ from the computation with no row moved."""
    name, block, tokens = list(blocks(rank))[2]
    expected, problems = taken(block, None, None, torch.float64, tokens), []
    for levels in (two_levels(8, 4), Levels((2, 2, 2))):
        for mode in ("off", "on"):
            found = taken(block, hierarchical(levels), Transfer(mode=mode), torch.float64, tokens)
            if distance(found, expected) > 1e-12:
                problems.append(f"{name}, {levels}, {mode}: {distance(found, expected)}")
    return problems


@pytest.mark.nightly
def test_eight_ranks_have_up_to_three_levels() -> None:
    assert [problem for problems in in_group(8, wrong_on_eight) for problem in problems] == []


def test_one_expert_a_token_needs_no_deduplication() -> None:
    block = Block(Placement(4, 1), None, 0, True, torch.eye(4), torch.ones(4), top_k=1)
    x, transfer = torch.randn(1, 2, 4), Transfer(mode="off")
    assert type(hierarchical(one_level(4))(block, 0, x, transfer)) is type(flat(block, 0, x, transfer))
    assert torch.equal(through(hierarchical(one_level(4)), block, x, transfer), through(flat, block, x, transfer))
