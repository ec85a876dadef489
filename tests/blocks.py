"""An ``ExpertBlock`` without DeepSpeed, and the same computation with no row moved."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.parallel.expert.block import ExpertOrder, Routing
from fcsd.parallel.expert.placement import Placement


def interleaved(experts: int, ranks: int) -> Placement:
    """Expert e is on rank ``e % ranks``."""
    return Placement(experts, ranks, tuple(expert for rank in range(ranks) for expert in range(rank, experts, ranks)))


@dataclass(frozen=True)
class Block:
    """A block with the router ``gate [hidden, experts]`` and the experts ``tanh(rows * scale[e])``.

    The experts are not linear, so that scores before and after them differ.
    """

    placement: Placement
    group: Any
    rank: int
    prescaled: bool
    gate: Tensor
    scale: Tensor  # [experts]
    top_k: int = 2
    shared: None = None

    @property
    def router(self) -> nn.Module:
        raise NotImplementedError

    experts = router

    def route(self, tokens: Tensor) -> Routing:
        scores, experts = torch.topk((tokens @ self.gate).softmax(dim=1), self.top_k)
        return Routing(scores, experts, experts.flatten().bincount(minlength=self.placement.experts))

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self._expert(self._mine().repeat(len(counts)).repeat_interleave(counts.flatten()), rows)

    def order(self, counts: Tensor, received: int) -> ExpertOrder:
        """One row of zeros follows the rows of each expert."""
        slots = torch.arange(counts.shape[1])
        arriving = slots.repeat(len(counts)).repeat_interleave(counts.flatten())
        assert len(arriving) == received
        every = torch.cat([arriving, slots]).argsort(stable=True)
        return ExpertOrder(torch.where(every < received, every, -1), counts.sum(0) + 1, received)

    def run_ordered(self, rows: Tensor, order: ExpertOrder) -> Tensor:
        return self._expert(self._mine().repeat_interleave(order.counts), rows)

    def _mine(self) -> Tensor:
        """The experts of this rank, in the order of their slots."""
        mine = torch.tensor([e for e in range(self.placement.experts) if self.placement.rank(e) == self.rank])
        return mine[torch.tensor([self.placement.slot(int(e)) for e in mine]).argsort()]

    def origin(self, name: str, blocks: Any) -> None:
        raise NotImplementedError

    def place(self, placement: Placement) -> None:
        raise NotImplementedError

    def without_moving(self, x: Tensor) -> Tensor:
        """The weighted sum over the experts of each token, ``[batch, seq, hidden]``."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, experts, _ = self.route(tokens)
        inputs, weight = tokens.unsqueeze(1), scores.unsqueeze(2)
        outputs = self._expert(experts, inputs * weight) if self.prescaled else self._expert(experts, inputs) * weight
        return outputs.sum(dim=1).view_as(x)

    def _expert(self, number: Tensor, rows: Tensor) -> Tensor:
        return torch.tanh(rows * self.scale[number].unsqueeze(-1))
