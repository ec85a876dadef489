"""The hierarchical dispatcher: it sends one row for each token and group of ranks, level by level (HierMoE §III-A).

A token whose experts share a rank sends one row to this rank, together with the weights. The rank runs its experts on
the row, and returns one weighted sum. With two levels, a token sends one row to each node that has any of its experts.
A relay there forwards the row to the node's ranks, sums their answers, and returns one row (``levels.py``).

In exact arithmetic the result is that of ``flat.py``. It rounds more often: once per rank, once per relay and once at
the token's own rank. Products and sums are computed in fp32 (fp64 for rows of fp64).

All sizes follow from one exchange of counts, as in the flat dispatcher: every rank tells how many of its tokens have
experts in each group of each level. Every exchange is an all-to-all of the whole expert-parallel group. At a level,
ranks that do not share it send nothing to each other.

The formats of quantised communication apply to the outermost level, whose links are the slowest. The rows that ranks of
a node exchange are sent as they are, so no row is rounded twice on its way. Rounding is to the nearest code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.profiler import record_function

from fcsd.kernels import Copies
from fcsd.parallel import order
from fcsd.parallel.deferred import Deferred, Exchange
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.counts import gather
from fcsd.parallel.expert.deduplicated import Collect, Moves, Open, Pack, Relay, moves_by, write
from fcsd.parallel.expert.dispatcher import Dispatcher, Packed, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.expert.levels import Levels, all_groups, one_level, row_matrices, two_levels
from fcsd.parallel.expert.records import Layout, RecordCodec, expert_order
from fcsd.parallel.quantised import Codecs
from fcsd.parallel.transports.transport import Splits, splits_of

Dedup = Literal["off", "rank", "node"]


def dispatcher_of(dedup: Dedup, ranks: int, node_size: int | None) -> Dispatcher:
    """The dispatcher that a value of ``parallel.dedup`` names.

    Args:
        dedup: ``off`` sends a row to each expert of a token, ``rank`` to each rank that has any of its experts, and
            ``node`` to each node.
        ranks: the size of the expert-parallel group.
        node_size: how many neighbouring ranks form a node; used by ``node`` only.

    Raises:
        ConfigError: see ``two_levels``.
    """
    if dedup == "off":
        return flat
    if dedup == "rank":
        return hierarchical(one_level(ranks))
    assert node_size is not None, "the recipe's checks require a node size"
    return hierarchical(two_levels(ranks, node_size))


def hierarchical(levels: Levels) -> Dispatcher:
    """The dispatcher over ``levels``: one exchange per level in each direction.

    A block whose tokens choose one expert has no duplicates, and neither has a block whose experts are all on one rank.
    Such a block takes the flat dispatcher.
    """

    def dispatcher(block: ExpertBlock, layer: int, x: Tensor, transfer: Transfer, /) -> Packed:
        if block.top_k == 1 or block.placement.ranks == 1:
            return flat(block, layer, x, transfer)
        return _pack(block, layer, x, transfer, levels)

    return dispatcher


class _Plan(NamedTuple):
    """The sizes of one layer's exchanges in one pass."""

    dispatch: list[Splits]  # by level
    combine: list[Splits]  # by level
    rows: int  # how many rows the experts of this rank get
    counts: Tensor  # [1, slots]: the same for each expert


def _pack(block: ExpertBlock, layer: int, x: Tensor, transfer: Transfer, levels: Levels) -> "_Packed":
    placement = block.placement
    layouts = [
        Layout(x.shape[-1], levels.choices(level, placement.experts, block.top_k), x.dtype)
        for level in range(levels.depth)
    ]
    codecs = Codecs() if transfer.quantiser is None else transfer.quantiser.codecs()
    tokens = x.reshape(-1, x.shape[-1])
    routing = block.route(tokens)
    weights = routing.scores.to(layouts[0].weight_dtype)
    common = _Pass(block, layer, transfer, levels, x.shape, layouts, codecs, moves_by(transfer.fused))
    with torch.no_grad():
        positions = placement.positions(routing.experts)
        wait_for_plan = common.start_plan(placement.by_position(routing.counts), positions)
        # The host does not know yet how many records there are, so the buffer holds the largest number.
        copies = common.copies_of(positions, level=0)
        written = write(tokens, weights, copies, layouts[0], copies.row_of.numel(), common.moves)
    ready = None if transfer.side is None else torch.cuda.current_stream().record_event()
    return _Packed(common, wait_for_plan, tokens, weights, copies, written, ready)


@dataclass(frozen=True)
class _Pass:
    """What is the same in all steps of a pass."""

    block: ExpertBlock
    layer: int
    transfer: Transfer
    levels: Levels
    shape: torch.Size
    layouts: list[Layout]  # by level
    codecs: Codecs
    moves: Moves

    def copies_of(self, experts: Tensor, level: int) -> Copies:
        """The copies that are sent at a level; ``experts [rows, choices]`` are numbered in the group of the rows."""
        groups, span = self.levels.sizes[level], self.levels.span(level, self.block.placement.experts)
        return self.moves.number_copies(experts, groups, span, self.layouts[level].choices)

    def dispatch_exchange(self, plan: _Plan, level: int) -> Exchange:
        """The exchange of a level of dispatch."""
        # If weights multiply the experts' inputs, their gradient needs the records that arrive at the last level.
        kept = self.block.prescaled and level == self.levels.depth - 1
        group, there, back = self.block.group, plan.dispatch[level], plan.combine[level]
        return self.transfer.exchange("dispatch", self.layer, group, there, back, kept)

    def send_back(self, plan: _Plan, level: int, rows: Tensor, awaited_at: int | None) -> Deferred:
        """Start a level of combine."""
        group, there, back = self.block.group, plan.combine[level], plan.dispatch[level]
        exchange = self.transfer.exchange("combine", self.layer, group, there, back, kept=False)
        if level == 0:
            exchange.codec, exchange.back_codec = self.codecs.combine, self.codecs.combine_grad
        # The computation that hides combine's gradient hides that of the outermost level, whose links are the slowest.
        # The gradients of the other levels are awaited as soon as they are sent.
        return self.transfer.send(rows, exchange, awaited_at if level == 0 else None)

    def start_plan(self, counts: Tensor, positions: Tensor) -> Callable[[], _Plan]:
        """Start to exchange ``counts [experts]`` and the numbers of tokens by group, in the order of positions."""
        levels, experts, rank = self.levels, self.block.placement.experts, self.block.rank
        slots = self.block.placement.slots
        passes = "recompute" if order.in_backward() else "fwd"
        with record_function(f"fcsd::plan.{passes}.L{self.layer}"):
            told = torch.cat([counts.long(), all_groups(positions, experts, levels)])
            summarise = partial(_summary, experts=experts, levels=levels)
            wait = gather(told, summarise, self.block.group, levels.ranks, self.transfer.side)

        def wait_for_plan() -> _Plan:
            everyone, summary = wait()
            told = torch.tensor(summary)
            matrices = row_matrices(told[:, :-1], levels)
            mine = everyone[:, rank * slots : (rank + 1) * slots].sum(dim=0, keepdim=True)
            return _Plan(
                [splits_of(matrix, rank) for matrix in matrices.tolist()],
                [splits_of(matrix, rank) for matrix in matrices.mT.tolist()],
                int(told[rank, -1]),
                mine.to(counts.dtype),
            )

        return wait_for_plan


@dataclass(frozen=True)
class _Packed:
    """See ``Packed``.

    Attributes:
        copies: where the rows go at the first level.
        written: as many records as there may be. Those to send are complete after the event ``ready``.
    """

    common: _Pass
    wait_for_plan: Callable[[], _Plan]
    tokens: Tensor
    weights: Tensor
    copies: Copies
    written: Tensor
    ready: torch.Event | None

    def dispatch(self, awaited_at: int | None) -> "_Dispatched":
        common, plan, layout = self.common, self.wait_for_plan(), self.common.layouts[0]
        written = [self.written[: sum(plan.dispatch[0].sends)]]
        records = Pack.apply(self.tokens, self.weights, written, self.copies, layout, common.moves)
        exchange = common.dispatch_exchange(plan, 0)
        if common.codecs.dispatch is not None:
            exchange.codec = RecordCodec(common.codecs.dispatch, layout)
        if common.codecs.dispatch_grad is not None:
            exchange.back_codec = RecordCodec(common.codecs.dispatch_grad, layout)
        exchange.ready, exchange.side = self.ready, common.transfer.side
        return _Dispatched(common, plan, (self.copies,), common.transfer.send(records, exchange, awaited_at))


@dataclass(frozen=True)
class _Dispatched:
    """See ``Dispatched``.

    Attributes:
        copies: where the rows went at each level so far.
        records: those of the last of these levels, which are in flight.
    """

    common: _Pass
    plan: _Plan
    copies: tuple[Copies, ...]
    records: Deferred

    def forward(self) -> Self:
        """See ``Dispatched``: await a level, and launch the next one, if one is left."""
        common, level = self.common, len(self.copies)
        if level == common.levels.depth:
            return self
        layout, next_layout = common.layouts[level - 1 : level + 1]
        records = self.records.wait()
        copies = common.copies_of(layout.experts(records), level)
        count = sum(self.plan.dispatch[level].sends)
        copied = Relay.apply(records, layout, copies, next_layout, count, common.moves)
        in_flight = common.transfer.send(copied, common.dispatch_exchange(self.plan, level), None)
        return type(self)(common, self.plan, (*self.copies, copies), in_flight)

    def combine(self, awaited_at: int | None) -> "_Combined":
        common, level = self.common, len(self.copies)
        if level < common.levels.depth:
            return self.forward().combine(awaited_at)
        opened = self._opened()
        # No name refers to the rows while the experts run, so that their memory is free.
        outputs = common.block.run(opened.pop(0), self.plan.counts)
        weights, row_of = opened
        sums = Collect.apply(outputs, None if common.block.prescaled else weights, row_of, common.moves)
        in_flight = common.send_back(self.plan, level - 1, sums, awaited_at)
        return _Combined(common, self.plan, self.copies, in_flight, awaited_at)

    def _opened(self) -> list[Tensor]:
        """Await the last level: the rows of the experts, the weights of the records, and ``row_of``."""
        common, layout, records = self.common, self.common.layouts[-1], self.records.wait()
        row_of = expert_order(layout.experts(records), common.block.placement.slots)
        opened = Open.apply(records, layout, row_of, self.plan.rows, common.block.prescaled, common.moves)
        return [*opened, row_of]


@dataclass(frozen=True)
class _Combined:
    """See ``Combined``.

    Attributes:
        copies: where the rows went in dispatch, at the levels from which they are not yet back.
        rows: those of the last of these levels, which are in flight.
        awaited_at: where the gradient of combine is awaited.
    """

    common: _Pass
    plan: _Plan
    copies: tuple[Copies, ...]
    rows: Deferred
    awaited_at: int | None

    def forward(self) -> Self:
        """See ``Combined``: await a level, sum, and launch the level before it, if one is left."""
        if len(self.copies) == 1:
            return self
        copies = self.copies[:-1]
        in_flight = self.common.send_back(self.plan, len(copies) - 1, self._summed(), self.awaited_at)
        return type(self)(self.common, self.plan, copies, in_flight, self.awaited_at)

    def land(self) -> Tensor:
        if len(self.copies) > 1:
            return self.forward().land()
        return self._summed().view(self.common.shape)

    def _summed(self) -> Tensor:
        """The sums of the rows that came back: one for each row that was sent from here."""
        return Collect.apply(self.rows.wait(), None, self.copies[-1].row_of, self.common.moves)


def _summary(everyone: Tensor, experts: int, levels: Levels) -> Tensor:
    """What the host needs of the counts of all ranks, ``[ranks, groups of all levels + 1]``.

    A line has the rows that a rank sends to each group, and then how many rows its own experts get. The host computes
    the matrices itself: a GPU would take longer to start all their operations.
    """
    counts, tokens = everyone[:, :experts], everyone[:, experts:]
    rows = counts.sum(dim=0).view(levels.ranks, -1).sum(dim=1)
    return torch.cat([tokens, rows.unsqueeze(1)], dim=1)
