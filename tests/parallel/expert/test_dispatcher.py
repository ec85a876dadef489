"""The dispatcher needs an ``ExpertBlock`` and its ``Placement``, and nothing else of what divides the experts."""

from itertools import groupby

import pytest
import tiny
import torch
import torch.distributed as dist
from blocks import Block, interleaved
from ranks import in_group
from torch import Tensor

from fcsd.models.build import arch_of
from fcsd.models.wiring import Wiring
from fcsd.parallel.expert.autoep import shard_experts
from fcsd.parallel.expert.dispatcher import Mode, Wire
from fcsd.parallel.expert.flat import FlatDispatcher
from fcsd.parallel.overlap import overlap
from fcsd.parallel.placement.placement import Placement

EXPERTS = 6
MOE_LAYERS = (0, 1, 3)  # of the tiny Qwen3


def through(x: Tensor, block: Block, wire: Wire) -> Tensor:
    one = FlatDispatcher(block, 0, x, wire)
    one.advance(None)
    one.advance(None)  # at a later place of the schedule, where nothing is left to start
    one.run_experts(None)
    one.advance(None)
    return one.land()


def wrong_cases(rank: int) -> list[str]:
    world = dist.get_world_size()
    problems = []
    gate, scale = torch.eye(8, EXPERTS), torch.arange(1.0, EXPERTS + 1)
    for placement in (Placement(EXPERTS, world), interleaved(EXPERTS, world)):
        for prescaled in (False, True):
            block = Block(placement, dist.group.WORLD, rank, prescaled, gate, scale)
            results = []
            for wire in (None, Wire(mode="off"), Wire(), Wire(mode="eager-sync"), Wire(fused=True)):
                x = torch.randn(2, 3 + rank, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
                y = block.without_moving(x) if wire is None else through(x, block, wire)
                y.square().sum().backward()
                results.append((wire, y.detach(), x.grad))
            for wire, y, grad in results[1:]:
                try:
                    torch.testing.assert_close((y, grad), results[0][1:], rtol=1e-5, atol=1e-6)
                except AssertionError as error:
                    problems.append(f"{placement} prescaled {prescaled} {wire}: {error}")
    return problems


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_reach_their_experts_wherever_these_are(world: int) -> None:
    assert [problem for rank in in_group(world, wrong_cases) for problem in rank] == []


def calls(rank: int) -> dict[str, list[str]]:
    """The steps of every layer's dispatcher, in order, in each mode."""
    events: list[str] = []

    class Noted(FlatDispatcher):
        def advance(self, awaited_at: int | None) -> None:
            events.append(f"advance {self._layer}")
            super().advance(awaited_at)

        def run_experts(self, awaited_at: int | None) -> None:
            events.append(f"experts {self._layer}")
            super().run_experts(awaited_at)

        def land(self) -> Tensor:
            events.append(f"land {self._layer}")
            return super().land()

    model = tiny.model("qwen3_moe")
    shard_experts(model, arch_of(model.config), dist.get_world_size())
    found = {}
    modes: tuple[Mode, ...] = ("on", "off")
    for mode in modes:
        overlap(model, Wiring("farskip", (0, 1, 2, 3)), mode, dispatcher=Noted)
        events.clear()
        model(tiny.tokens(seed=rank), use_cache=False)
        found[mode] = [event for event, _ in groupby(events)]  # repeated calls count once
    return found


def test_the_schedule_and_the_reference_call_the_dispatcher_that_they_are_given() -> None:
    (found,) = in_group(1, calls)
    assert found["off"] == [f"{step} {layer}" for layer in MOE_LAYERS for step in ("advance", "experts", "land")]
    for layer in MOE_LAYERS:
        # The second call of ``advance`` is where a dispatcher of several levels forwards rows on their way back.
        mine = [event.split()[0] for event in found["on"] if event.endswith(str(layer))]
        assert mine == ["advance", "experts", "advance", "land"]
