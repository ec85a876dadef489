"""The flat dispatcher: it sends one row for each token and chosen expert directly to the expert's rank, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.profiler import record_function

from fcsd.parallel import order
from fcsd.parallel.deferred import Codec, Deferred
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.counts import gather
from fcsd.parallel.expert.dispatcher import Packed, Transfer
from fcsd.parallel.expert.permute import FusedPermute, Permute, RowPermute, stable_order
from fcsd.parallel.quantised import Codecs, simulate
from fcsd.parallel.transports.transport import Splits, splits_of


class _Plan(NamedTuple):
    """The sizes of one layer's exchanges in one pass."""

    dispatch: Splits
    combine: Splits
    counts: Tensor  # [ranks, slots]: how many rows come from each rank for each expert of this rank


def flat(block: ExpertBlock, layer: int, x: Tensor, transfer: Transfer, /) -> Packed:
    """See ``Dispatcher``: one exchange in each direction, whose buffers exist from its launch to their first use."""
    tokens = x.reshape(-1, x.shape[-1])
    routing = block.route(tokens)
    # [tokens * top_k]: the (token, k) pair of each row, where rows are ordered by the position of their expert.
    pairs = stable_order(block.placement.positions(routing.experts).view(-1), block.placement.experts)
    plan = cache(_start_plan(block, layer, transfer.side, block.placement.by_position(routing.counts), len(pairs)))
    permute, codecs = _permute_and_codecs(block, transfer, pairs, routing.scores, plan)
    rows = permute.pack(tokens)
    ready = None if transfer.side is None else torch.cuda.current_stream().record_event()
    return _Packed(_Pass(block, layer, transfer, x.shape, plan, permute, codecs), rows, ready)


def _permute_and_codecs(
    block: ExpertBlock, transfer: Transfer, pairs: Tensor, scores: Tensor, plan: Callable[[], _Plan]
) -> tuple[Permute, Codecs]:
    """The order of the rows and their codecs: the fused pair where its kernels compute both."""
    quantiser = transfer.quantiser
    formats = None if quantiser is None else quantiser.formats
    if formats is not None and transfer.fused and not block.prescaled:
        fused = FusedPermute(pairs, scores, formats, lambda: block.order(plan().counts, sum(plan().dispatch.receives)))
        return fused, fused.codecs
    codecs = Codecs() if quantiser is None else quantiser.codecs()
    return RowPermute(pairs, scores, block.prescaled, transfer.fused), codecs


@dataclass(frozen=True)
class _Pass:
    """What is the same in all steps of a pass; ``plan`` waits for the counts when it is called first."""

    block: ExpertBlock
    layer: int
    transfer: Transfer
    shape: torch.Size
    plan: Callable[[], _Plan]
    permute: Permute
    codecs: Codecs

    def send(
        self,
        name: str,
        rows: Tensor,
        codecs: tuple[Codec | None, Codec | None],
        awaited_at: int | None,
        ready: torch.Event | None = None,
    ) -> Deferred:
        """Start an exchange; the codecs are those of the rows and of their gradient."""
        if self.block.placement.ranks == 1:
            return Deferred(simulate(rows, *codecs), None)
        there, back = self.plan().dispatch, self.plan().combine
        if name == "combine":
            there, back = back, there
        exchange = self.transfer.exchange(name, self.layer, self.block.group, there, back, kept=name == "combine")
        exchange.codec, exchange.back_codec = codecs
        exchange.ready, exchange.side = ready, self.transfer.side
        return self.transfer.send(rows, exchange, awaited_at)


@dataclass(frozen=True)
class _Packed:
    """See ``Packed``; the rows to send are complete after the event ``ready``."""

    common: _Pass
    rows: Tensor
    ready: torch.Event | None

    def dispatch(self, awaited_at: int | None) -> "_Dispatched":
        common, codecs = self.common, self.common.codecs
        common.plan()
        in_flight = common.send("dispatch", self.rows, (codecs.dispatch, codecs.dispatch_grad), awaited_at, self.ready)
        return _Dispatched(common, in_flight)


@dataclass(frozen=True)
class _Dispatched:
    """See ``Dispatched``."""

    common: _Pass
    rows: Deferred

    def forward(self) -> Self:
        """See ``Dispatched``: there is one level."""
        return self

    def combine(self, awaited_at: int | None) -> "_Combined":
        common, codecs = self.common, self.common.codecs
        outputs = common.permute.run(common.block, self.rows, common.plan().counts)
        return _Combined(common, common.send("combine", outputs, (codecs.combine, codecs.combine_grad), awaited_at))


@dataclass(frozen=True)
class _Combined:
    """See ``Combined``."""

    common: _Pass
    rows: Deferred

    def forward(self) -> Self:
        """See ``Dispatched``: there is one level."""
        return self

    def land(self) -> Tensor:
        return self.common.permute.unpack(self.rows.wait()).view(self.common.shape)


def _start_plan(
    block: ExpertBlock, layer: int, side: torch.cuda.Stream | None, counts: Tensor, rows: int
) -> Callable[[], _Plan]:
    """Start to exchange ``counts [experts]``, in the order of positions; this rank sends ``rows`` rows."""
    ranks, slots, rank = block.placement.ranks, block.placement.slots, block.rank
    if ranks == 1:  # the host knows the only split
        plan = _plan([[rows]], 0, counts.view(1, 1, -1))
        return lambda: plan
    passes = "recompute" if order.in_backward() else "fwd"
    with record_function(f"fcsd::plan.{passes}.L{layer}"):
        wait = gather(counts, lambda every: every.view(ranks, ranks, slots).sum(dim=2), block.group, ranks, side)

    def wait_for_plan() -> _Plan:
        everyone, matrix = wait()
        return _plan(matrix, rank, everyone.view(ranks, ranks, slots))

    return wait_for_plan


def _plan(matrix: list[list[int]], rank: int, counts: Tensor) -> _Plan:
    """The plan of ``rank``.

    Args:
        matrix: how many rows each rank sends to each rank, ``matrix[sender][receiver]``.
        counts: the same numbers for each slot of the receiver, ``[senders, receivers, slots]``.
    """
    transposed = [list(column) for column in zip(*matrix, strict=True)]
    return _Plan(splits_of(matrix, rank), splits_of(transposed, rank), counts[:, rank])
