"""The dispatcher needs an ``ExpertBlock`` and its ``Placement``, and nothing else of what divides the experts."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import in_group
from torch import Tensor, nn

from fcsd.models.build import arch_of
from fcsd.models.wiring import Wiring
from fcsd.parallel.expert.autoep import shard_experts
from fcsd.parallel.expert.block import Routing
from fcsd.parallel.expert.dispatcher import Mode, Wire
from fcsd.parallel.expert.flat import FlatDispatcher
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.overlap import overlap

EXPERTS, TOP_K = 6, 2
MOE_LAYERS = (0, 1, 3)  # of the tiny Qwen3


@dataclass(frozen=True)
class Interleaved(Placement):
    """Expert e is on rank ``e % ranks``."""

    def rank(self, expert: int) -> int:
        return expert % self.ranks

    def slot(self, expert: int) -> int:
        return expert // self.ranks

    def positions(self, experts: Tensor) -> Tensor:
        return experts % self.ranks * self.slots + experts // self.ranks

    def by_position(self, values: Tensor) -> Tensor:
        return values.view(self.slots, self.ranks).T.reshape(-1)


def expert(number: Tensor, rows: Tensor) -> Tensor:
    """An expert of the block below: not linear, so that scores before and after it differ."""
    return torch.tanh(rows * (number + 1).unsqueeze(-1))


@dataclass(frozen=True)
class Block:
    """An ``ExpertBlock`` without DeepSpeed, whose router has no weights."""

    placement: Placement
    group: Any
    rank: int
    prescaled: bool
    top_k: int = TOP_K
    shared: None = None

    @property
    def router(self) -> nn.Module:
        raise NotImplementedError

    experts = router

    def route(self, tokens: Tensor) -> Routing:
        scores, experts = torch.topk(tokens[:, :EXPERTS].softmax(dim=1), TOP_K)
        return Routing(scores, experts, experts.flatten().bincount(minlength=EXPERTS))

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        mine = torch.tensor([e for e in range(EXPERTS) if self.placement.rank(e) == self.rank])
        mine = mine[torch.tensor([self.placement.slot(int(e)) for e in mine]).argsort()]
        return expert(mine.repeat(len(counts)).repeat_interleave(counts.flatten()), rows)

    def origin(self, name: str, blocks: Any) -> None:
        raise NotImplementedError


def expected(x: Tensor, block: Block) -> Tensor:
    """The sum over a token's experts, with no rows moved: ``[batch, seq, hidden]``."""
    tokens = x.reshape(-1, x.shape[-1])
    scores, experts, _ = block.route(tokens)
    inputs, weight = tokens.unsqueeze(1), scores.unsqueeze(2)
    outputs = expert(experts, inputs * weight) if block.prescaled else expert(experts, inputs) * weight
    return outputs.sum(dim=1).view_as(x)


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
    for placement in (Placement(EXPERTS, world), Interleaved(EXPERTS, world)):
        for prescaled in (False, True):
            block = Block(placement, dist.group.WORLD, rank, prescaled)
            results = []
            for wire in (None, Wire(mode="off"), Wire(), Wire(mode="eager-sync"), Wire(fused=True)):
                x = torch.randn(2, 3 + rank, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
                y = expected(x, block) if wire is None else through(x, block, wire)
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
