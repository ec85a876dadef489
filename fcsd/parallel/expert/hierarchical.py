"""The hierarchical dispatcher: it sends one row for each token and group of ranks, level by level (HierMoE §III-A).

A token whose experts share a rank sends one row to this rank, together with the weights. The rank runs its experts on
the row, and returns one weighted sum. With two levels, a token sends one row to each node that has any of its experts.
A relay there forwards the row to the node's ranks, sums their answers, and returns one row (``levels.py``).

In exact arithmetic the result is that of ``flat.py``. It rounds more often: once per rank, once per relay and once at
the token's own rank. Products and sums are computed in fp32 (fp64 for rows of fp64).

All sizes follow from one exchange of counts, as in the flat dispatcher: every rank tells how many of its tokens have
experts in each group of each level. Every exchange is an all-to-all of the whole expert-parallel group. At a level,
ranks that do not share it send nothing to each other.

Levels without deduplication take the same path with one row for each token and expert.

The formats of a quantised wire apply to the outermost level, whose links are the slowest. The rows that ranks of a node
exchange are sent as they are, so no row is rounded twice on its way. Rounding is to the nearest code.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from fcsd.kernels.copies_reference import Copies
from fcsd.parallel import order
from fcsd.parallel.cost import Dedup
from fcsd.parallel.deferred import Deferred, Exchange, exchange_now, launch
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.choice import arrangements
from fcsd.parallel.expert.counts import gather
from fcsd.parallel.expert.deduplicated import Collect, Open, Pack, Relay, moves_by, write
from fcsd.parallel.expert.dispatcher import Dispatcher, MakeDispatcher, Wire
from fcsd.parallel.expert.flat import FlatDispatcher
from fcsd.parallel.expert.levels import Levels, all_groups, one_level, row_matrices, two_levels
from fcsd.parallel.expert.records import Layout, RecordCodec, copies_by_choice, expert_order
from fcsd.parallel.quantised.rows import Codecs
from fcsd.parallel.transports.codec import Codec
from fcsd.parallel.transports.transport import Splits, splits_of
from fcsd.parallel.turns import yield_turn


class ByLayer:
    """Makes the dispatchers of ``parallel.dedup: auto``: a ``MakeDispatcher`` that may differ from layer to layer.

    Attributes:
        offered: the levels of each value of ``parallel.dedup`` that can be chosen, from the fewest levels on.
        chosen: the choice for each layer, by its 0-based index. A layer without a choice takes the last value offered.
            Every rank has the same choices, and changes them between two steps only.
    """

    def __init__(self, ranks: int, node_size: int | None) -> None:
        self.offered = arrangements(ranks, node_size)
        self.chosen: dict[int, Dedup] = {}
        self._makes = {dedup: dispatcher_of(dedup, ranks, node_size) for dedup in self.offered}

    def __call__(self, block: ExpertBlock, layer: int, x: Tensor, wire: Wire) -> Dispatcher:
        """See ``MakeDispatcher``."""
        dedup = self.chosen.get(layer, next(reversed(self.offered)))
        return self._makes[dedup](block, layer, x, wire)


def dispatcher_of(dedup: Dedup, ranks: int, node_size: int | None) -> MakeDispatcher:
    """Makes the dispatchers that a value of ``parallel.dedup`` names; ``ByLayer`` makes those of ``auto``.

    Args:
        dedup: ``off`` sends a row to each expert of a token, ``rank`` to each rank that has any of its experts, and
            ``node`` to each node.
        ranks: the size of the expert-parallel group.
        node_size: how many neighbouring ranks form a node; used by ``node`` only.

    Raises:
        ConfigError: see ``two_levels``.
    """
    if dedup == "off":
        return FlatDispatcher
    if dedup == "rank":
        return hierarchical(one_level(ranks))
    assert node_size is not None, "the recipe's checks require a node size"
    return hierarchical(two_levels(ranks, node_size))


def hierarchical(levels: Levels) -> MakeDispatcher:
    """Makes the dispatchers of a model whose experts are divided over ``levels``.

    A block whose tokens choose one expert has no duplicates, and neither has a block whose experts are all on one rank.
    Such a block gets the flat dispatcher. ``levels`` without deduplication are a baseline for benchmarks (2DH).
    """

    def make(block: ExpertBlock, layer: int, x: Tensor, wire: Wire) -> Dispatcher:
        if block.top_k == 1 or block.placement.ranks == 1:
            return FlatDispatcher(block, layer, x, wire)
        return HierarchicalDispatcher(block, layer, x, wire, levels)

    return make


class _Plan(NamedTuple):
    """The sizes of one layer's exchanges in one pass."""

    dispatch: list[Splits]  # by level
    combine: list[Splits]  # by level
    rows: int  # how many rows the experts of this rank get
    counts: Tensor  # [1, slots]: the same for each expert


class HierarchicalDispatcher:
    """A ``Dispatcher`` with one exchange per level in each direction.

    Args:
        block: the MoE block.
        layer: 0-based index of the decoder layer.
        x: normalised input ``[batch, seq, hidden]``.
        wire: how the rows travel.
        levels: how the ranks of the block's group form levels.
    """

    def __init__(self, block: ExpertBlock, layer: int, x: Tensor, wire: Wire, levels: Levels) -> None:
        self._block, self._layer, self._wire, self._levels, self._shape = block, layer, wire, levels, x.shape
        self._moves = moves_by(wire.fused)
        self._experts = block.placement.experts
        self._tokens = x.reshape(-1, x.shape[-1])
        routing = block.route(self._tokens)
        self._layouts = [
            Layout(x.shape[-1], levels.choices(level, self._experts, block.top_k), x.dtype)
            for level in range(levels.depth)
        ]
        self._codecs = Codecs() if wire.quantiser is None else wire.quantiser.nearest()
        self._weights = routing.scores.to(self._layouts[0].weight_dtype)
        with torch.no_grad():
            positions = block.placement.positions(routing.experts)
            self._wait_for_plan = self._start_plan(block.placement.by_position(routing.counts), positions)
            # The host does not know yet how many records there are, so the buffer has room for the largest number.
            self._copies = [self._copies_of(positions, level=0)]
            most = self._copies[0].row_of.numel()
            self._written = [write(self._tokens, self._weights, self._copies[0], self._layouts[0], most, self._moves)]
        self._written_event = None if wire.side is None else torch.cuda.current_stream().record_event()
        self._level = -1  # the level of the exchange that was launched last
        self._in_flight: Deferred | None = None
        self._returning = False
        self._awaited_at: int | None = None  # where the gradient of combine is awaited

    def advance(self, awaited_at: int | None) -> None:
        """See ``Dispatcher``: each call starts the exchange of the next level, if one is left."""
        if self._returning:
            if self._level > 0:
                self._return()
        elif self._level < 0:
            self._start(awaited_at)
        elif self._level < self._levels.depth - 1:
            self._forward()

    def run_experts(self, awaited_at: int | None) -> None:
        """See ``Dispatcher``."""
        while self._level < self._levels.depth - 1:
            self._forward()
        opened = self._opened()
        # No name refers to the rows while the experts run, so that their memory is free.
        outputs = self._block.run(opened.pop(0), self._plan.counts)
        weights, row_of = opened
        self._returning, self._awaited_at = True, awaited_at
        self._send_back(Collect.apply(outputs, None if self._block.prescaled else weights, row_of, self._moves))

    def land(self) -> Tensor:
        """See ``Dispatcher``."""
        while self._level > 0:
            self._return()
        return self._summed().view(self._shape)

    def _start(self, awaited_at: int | None) -> None:
        """Launch the first level of dispatch."""
        yield_turn()
        self._plan = self._wait_for_plan()
        written = self._written[0][: sum(self._plan.dispatch[0].sends)]
        self._written.clear()
        records = Pack.apply(self._tokens, self._weights, [written], self._copies[0], self._layouts[0], self._moves)
        del self._tokens, self._weights
        self._dispatch(records, 0, awaited_at)

    def _forward(self) -> None:
        """Await a level of dispatch, and launch the next one."""
        level = self._level + 1
        layout, next_layout = self._layouts[level - 1 : level + 1]
        records = self._landed()
        self._copies.append(self._copies_of(layout.experts(records), level))
        count = sum(self._plan.dispatch[level].sends)
        copied = Relay.apply(records, layout, self._copies[level], next_layout, count, self._moves)
        self._dispatch(copied, level, None)

    def _opened(self) -> list[Tensor]:
        """Await the last level of dispatch: the rows of the experts, the weights of the records, and ``row_of``."""
        layout = self._layouts[-1]
        records = self._landed()
        row_of = expert_order(layout.experts(records), self._block.placement.slots)
        return [*Open.apply(records, layout, row_of, self._plan.rows, self._block.prescaled, self._moves), row_of]

    def _return(self) -> None:
        """Await a level of combine, sum, and launch the level before it."""
        sums = self._summed()
        self._level -= 1
        self._send_back(sums)

    def _summed(self) -> Tensor:
        """The sums of the rows that came back at the current level: one for each row that was sent from here."""
        return Collect.apply(self._landed(), None, self._copies.pop().row_of, self._moves)

    def _copies_of(self, experts: Tensor, level: int) -> Copies:
        """The copies that are sent at a level; ``experts [rows, choices]`` are numbered in the group of the rows."""
        groups, span = self._levels.sizes[level], self._levels.span(level, self._experts)
        if not self._levels.deduplicated:
            return copies_by_choice(experts, groups, span)
        return self._moves.number_copies(experts, groups, span, self._layouts[level].choices)

    def _landed(self) -> Tensor:
        assert self._in_flight is not None, "nothing is in flight"
        in_flight, self._in_flight = self._in_flight, None
        return in_flight.wait()

    def _dispatch(self, records: Tensor, level: int, awaited_at: int | None) -> None:
        # If weights multiply the experts' inputs, their gradient needs the records that arrive at the last level.
        kept = self._block.prescaled and level == self._levels.depth - 1
        exchange = self._exchange("dispatch", self._plan.dispatch[level], self._plan.combine[level], kept)
        if level == 0:
            codecs = self._codecs.dispatch, self._codecs.dispatch_grad
            exchange.codec, exchange.back_codec = map(self._of_records, codecs)
            exchange.ready, exchange.side = self._written_event, self._wire.side
        self._level = level
        self._in_flight = self._send(records, exchange, awaited_at)

    def _send_back(self, rows: Tensor) -> None:
        exchange = self._exchange("combine", self._plan.combine[self._level], self._plan.dispatch[self._level], False)
        if self._level == 0:
            exchange.codec, exchange.back_codec = self._codecs.combine, self._codecs.combine_grad
        # The computation that hides combine's gradient hides that of the outermost level, whose links are the slowest.
        # The gradients of the other levels are awaited as soon as they are sent.
        self._in_flight = self._send(rows, exchange, self._awaited_at if self._level == 0 else None)

    def _exchange(self, name: str, there: Splits, back: Splits, kept: bool) -> Exchange:
        wire = self._wire
        eager = wire.mode == "eager-sync"
        exchange = Exchange(name, self._layer, self._block.group, there, back, kept, wire.transport, eager)
        exchange.traffic = wire.traffic
        return exchange

    def _of_records(self, codec: Codec | None) -> Codec | None:
        return None if codec is None else RecordCodec(codec, self._layouts[0])

    def _send(self, rows: Tensor, exchange: Exchange, awaited_at: int | None) -> Deferred:
        if self._wire.mode == "off":
            return Deferred(exchange_now(rows, exchange), None)
        return launch(rows, exchange, awaited_at)

    def _start_plan(self, counts: Tensor, positions: Tensor) -> Callable[[], _Plan]:
        """Start to exchange ``counts [experts]`` and the numbers of tokens by group, in the order of positions."""
        levels, experts, rank = self._levels, self._experts, self._block.rank
        slots = self._block.placement.slots
        passes = "recompute" if order.in_backward() else "fwd"
        with record_function(f"fcsd::plan.{passes}.L{self._layer}"):
            told = torch.cat([counts.long(), all_groups(positions, experts, levels)])
            summarise = partial(_summary, experts=experts, levels=levels)
            wait = gather(told, summarise, self._block.group, levels.ranks, self._wire.side)

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


def _summary(everyone: Tensor, experts: int, levels: Levels) -> Tensor:
    """What the host needs of the counts of all ranks, ``[ranks, groups of all levels + 1]``.

    A line has the rows that a rank sends to each group, and then how many rows its own experts get. The host computes
    the matrices itself: a GPU would take longer to start all their operations.
    """
    counts, tokens = everyone[:, :experts], everyone[:, experts:]
    rows = counts.sum(dim=0).view(levels.ranks, -1).sum(dim=1)
    return torch.cat([tokens, rows.unsqueeze(1)], dim=1)
