"""The dispatcher needs an ``ExpertBlock`` and its ``Placement``, and nothing else of what divides the experts."""

from itertools import groupby
from typing import Any

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
from fcsd.parallel.expert.dispatcher import Mode, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.overlap import overlap

EXPERTS = 6
MOE_LAYERS = (0, 1, 3)  # of the tiny Qwen3


def through(x: Tensor, block: Block, transfer: Transfer) -> Tensor:
    handle = flat(block, 0, x, transfer).dispatch(None)
    # At later places of the schedule nothing is left to start.
    return handle.forward().combine(None).forward().land()


def wrong_cases(rank: int) -> list[str]:
    world = dist.get_world_size()
    problems = []
    gate, scale = torch.eye(8, EXPERTS), torch.arange(1.0, EXPERTS + 1)
    for placement in (Placement(EXPERTS, world), interleaved(EXPERTS, world)):
        for prescaled in (False, True):
            block = Block(placement, dist.group.WORLD, rank, prescaled, gate, scale)
            results = []
            for transfer in (None, Transfer(mode="off"), Transfer(), Transfer(mode="eager-sync"), Transfer(fused=True)):
                x = torch.randn(2, 3 + rank, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
                y = block.without_moving(x) if transfer is None else through(x, block, transfer)
                y.square().sum().backward()
                results.append((transfer, y.detach(), x.grad))
            for transfer, y, grad in results[1:]:
                try:
                    torch.testing.assert_close((y, grad), results[0][1:], rtol=1e-5, atol=1e-6)
                except AssertionError as error:
                    problems.append(f"{placement} prescaled {prescaled} {transfer}: {error}")
    return problems


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_reach_their_experts_wherever_these_are(world: int) -> None:
    assert [problem for rank in in_group(world, wrong_cases) for problem in rank] == []


def calls(rank: int) -> dict[str, list[str]]:
    """The steps of every layer's dispatcher, in order, in each mode."""
    events: list[str] = []

    class Noted:
        """A step of a pass, which notes what is called."""

        def __init__(self, step: Any, layer: int) -> None:
            self.step, self.layer = step, layer

        def __getattr__(self, name: str) -> Any:
            def call(*given: Any) -> Any:
                events.append(f"{name} {self.layer}")
                result = getattr(self.step, name)(*given)
                return result if name == "land" else Noted(result, self.layer)

            return call

    def noted(block: Any, layer: int, x: Tensor, transfer: Transfer, /) -> Any:
        return Noted(flat(block, layer, x, transfer), layer)

    model = tiny.model("qwen3_moe")
    shard_experts(model, arch_of(model.config), dist.get_world_size())
    found = {}
    modes: tuple[Mode, ...] = ("on", "off")
    for mode in modes:
        overlap(model, Wiring("farskip", (0, 1, 2, 3)), mode, dispatcher=noted)
        events.clear()
        model(tiny.tokens(seed=rank), use_cache=False)
        found[mode] = [event for event, _ in groupby(events)]  # repeated calls count once
    return found


def test_the_schedule_and_the_reference_call_the_dispatcher_that_they_are_given() -> None:
    (found,) = in_group(1, calls)
    assert found["off"] == [f"{step} {layer}" for layer in MOE_LAYERS for step in ("dispatch", "combine", "land")]
    for layer in MOE_LAYERS:
        # A dispatcher of several levels forwards rows on their way to the experts, and on their way back.
        mine = [event.split()[0] for event in found["on"] if event.endswith(str(layer))]
        assert mine == ["dispatch", "forward", "combine", "forward", "land"]
