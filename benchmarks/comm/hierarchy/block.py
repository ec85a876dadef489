"""Routed experts that compute nothing or next to nothing, so that dispatch and combine can be timed and checked."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.parallel.expert.block import ExpertBlock, Routing
from fcsd.parallel.placement.placement import Placement


@dataclass(frozen=True)
class _Block:
    """The part of an ``ExpertBlock`` that dispatchers use.

    ``factors [experts]``, if any, multiply the rows of each expert. Otherwise experts return their rows as they are.
    """

    placement: Placement
    group: Any
    rank: int
    top_k: int
    routing: Routing
    factors: Tensor | None
    prescaled: bool = False

    def route(self, tokens: Tensor) -> Routing:
        del tokens
        return self.routing

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.factors is None:
            return rows
        slots = self.placement.slots
        own = self.placement.by_position(self.factors)[self.rank * slots : (self.rank + 1) * slots]
        return rows * own.repeat(len(counts)).repeat_interleave(counts.flatten()).unsqueeze(1).to(rows.dtype)


def block_of(chosen: Tensor, scores: Tensor, placement: Placement, rank: int, factors: Tensor | None) -> ExpertBlock:
    """A block whose router has made its choice.

    Args:
        chosen: ``[tokens, top_k]``, the numbers of the experts that this rank's tokens chose.
        scores: fp32 ``[tokens, top_k]``.
        placement: where the experts are.
        rank: this rank.
        factors: see ``_Block``.
    """
    counts = chosen.flatten().bincount(minlength=placement.experts)
    routing = Routing(scores, chosen, counts)
    return cast(ExpertBlock, _Block(placement, dist.group.WORLD, rank, chosen.shape[1], routing, factors))


def exact_scores(chosen: Tensor) -> Tensor:
    """Scores 1/8, 2/8 and so on up to 1, by the numbers of experts. Sums of rows of -1, 0 and 1 are exact in bf16."""
    return (chosen % 8 + 1).float() / 8


def exact_rows(tokens: int, width: int, rank: int, device: torch.device) -> Tensor:
    """Random rows of -1, 0 and 1, bf16 ``[1, tokens, width]``."""
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randint(-1, 2, (1, tokens, width), generator=generator, device=device).bfloat16()


def exact_factors(experts: int, device: torch.device) -> Tensor:
    """A factor 1, -1, 2 or -2 for each expert, so that a row at the wrong expert is seen."""
    return torch.tensor([1.0, -1.0, 2.0, -2.0], device=device).repeat(experts // 4 + 1)[:experts]


def without_moving(x: Tensor, chosen: Tensor, factors: Tensor | None) -> Tensor:
    """What the block returns for tokens ``x [1, tokens, width]`` with ``exact_scores``, without any exchange."""
    scores = exact_scores(chosen)
    weights = scores if factors is None else scores * factors[chosen]
    return (x.float() * weights.sum(dim=1)[None, :, None]).to(x.dtype)
