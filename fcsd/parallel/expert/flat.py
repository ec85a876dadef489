"""The flat dispatcher: it sends one row for each token and chosen expert directly to the expert's rank, and back."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from fcsd.kernels import rows_reference
from fcsd.parallel import order
from fcsd.parallel.deferred import Deferred, Exchange, exchange_now, launch
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.counts import gather
from fcsd.parallel.expert.dispatcher import Wire
from fcsd.parallel.expert.moving import FromExperts, RowPlaces, ToExperts
from fcsd.parallel.expert.sorting import stable_order
from fcsd.parallel.quantised.rows import Codecs, WireFormats, simulate
from fcsd.parallel.transports.codec import Codec
from fcsd.parallel.transports.transport import Splits, splits_of
from fcsd.parallel.turns import yield_turn

_Move = Callable[[Tensor, Tensor | None], Tensor]


class _Plan(NamedTuple):
    """The sizes of one layer's exchanges in one pass."""

    dispatch: Splits
    combine: Splits
    counts: Tensor  # [ranks, slots]: how many rows come from each rank for each expert of this rank


class FlatDispatcher:
    """A ``Dispatcher`` with one exchange in each direction. Its buffers exist from their launch to their first use.

    Args:
        block: the MoE block.
        layer: 0-based index of the decoder layer.
        x: normalised input ``[batch, seq, hidden]``.
        wire: how the rows travel.
    """

    def __init__(self, block: ExpertBlock, layer: int, x: Tensor, wire: Wire) -> None:
        self._block, self._layer, self._wire, self._shape = block, layer, wire, x.shape
        self._placement = block.placement
        tokens = x.reshape(-1, x.shape[-1])
        routing = block.route(tokens)
        # [tokens * top_k]: the (token, k) pair of each row, where rows are ordered by the position of their expert.
        pairs = stable_order(self._placement.positions(routing.experts).view(-1), self._placement.experts)
        # The scores multiply the rows before the experts, or their outputs after them.
        before, self._after = (routing.scores, None) if block.prescaled else (None, routing.scores)
        self._places = _places_on_wire(pairs, block, wire)
        if self._places is not None and wire.quantiser is not None:
            self._codecs = _moving_codecs(self._places, wire.quantiser.formats, routing.scores.detach())
        elif wire.quantiser is not None:
            self._codecs = wire.quantiser.codecs(layer, pairs, block.top_k)
        else:
            self._codecs = Codecs()
        self._wait_for_plan = self._start_plan(self._placement.by_position(routing.counts), len(pairs))
        # [tokens * top_k, hidden]: the rows to send, one destination after the other. If codecs pack them, the tokens.
        self._packed: Tensor | None = tokens
        if self._places is None:
            permute, self._unpermute = _moves(pairs, block.top_k, wire.fused)
            self._packed = permute(tokens, before)
        self._packed_event = None if wire.side is None else torch.cuda.current_stream().record_event()
        self._dispatch: Deferred | None = None
        self._combine: Deferred | None = None

    def advance(self, awaited_at: int | None) -> None:
        """See ``Dispatcher``: the first call starts dispatch, later calls do nothing."""
        if self._packed is None:
            return
        yield_turn()
        self._plan = plan = self._wait_for_plan()
        if self._places is not None:
            self._places.find_order = partial(self._block.order, plan.counts, sum(plan.dispatch.receives))
        codecs = self._codecs.dispatch, self._codecs.dispatch_grad
        exchange = self._exchange("dispatch", plan.dispatch, plan.combine, *codecs, kept=False)
        exchange.ready, exchange.side = self._packed_event, self._wire.side
        self._dispatch = self._send(self._packed, exchange, awaited_at)
        self._packed = None

    def run_experts(self, awaited_at: int | None) -> None:
        """See ``Dispatcher``."""
        assert self._dispatch is not None, "dispatch has not started"
        if self._places is None:
            outputs = self._block.run(self._dispatch.wait(), self._plan.counts)
        else:
            outputs = self._block.run_ordered(self._dispatch.wait(), self._places.order)
        self._dispatch = None
        codecs = self._codecs.combine, self._codecs.combine_grad
        exchange = self._exchange("combine", self._plan.combine, self._plan.dispatch, *codecs, kept=True)
        self._combine = self._send(outputs, exchange, awaited_at)

    def land(self) -> Tensor:
        """See ``Dispatcher``."""
        assert self._combine is not None, "combine has not started"
        rows = self._combine.wait()
        self._combine = None
        if isinstance(self._codecs.combine, FromExperts) and self._after is not None:
            return self._codecs.combine.with_gradient_of(self._after, rows).view(self._shape)
        return self._unpermute(rows, self._after).view(self._shape)

    def _start_plan(self, counts: Tensor, rows: int) -> Callable[[], _Plan]:
        """Start to exchange ``counts [experts]``, in the order of positions; this rank sends ``rows`` rows."""
        ranks, slots, rank, group = self._placement.ranks, self._placement.slots, self._block.rank, self._block.group
        if ranks == 1:  # the host knows the only split
            plan = _plan([[rows]], 0, counts.view(1, 1, -1))
            return lambda: plan
        passes = "recompute" if order.in_backward() else "fwd"
        with record_function(f"fcsd::plan.{passes}.L{self._layer}"):
            wait = gather(
                counts, lambda every: every.view(ranks, ranks, slots).sum(dim=2), group, ranks, self._wire.side
            )

        def wait_for_plan() -> _Plan:
            everyone, matrix = wait()
            return _plan(matrix, rank, everyone.view(ranks, ranks, slots))

        return wait_for_plan

    def _exchange(
        self, name: str, there: Splits, back: Splits, codec: Codec | None, back_codec: Codec | None, kept: bool
    ) -> Exchange:
        wire = self._wire
        return Exchange(
            name=name,
            layer=self._layer,
            group=self._block.group,
            there=there,
            back=back,
            kept=kept,
            transport=wire.transport,
            eager=wire.mode == "eager-sync",
            codec=codec,
            back_codec=back_codec,
            traffic=wire.traffic,
        )

    def _send(self, rows: Tensor, exchange: Exchange, awaited_at: int | None) -> Deferred:
        if self._placement.ranks == 1:
            return Deferred(simulate(rows, exchange.codec, exchange.back_codec), None)
        if self._wire.mode == "off":
            return Deferred(exchange_now(rows, exchange), None)
        return launch(rows, exchange, awaited_at)


def _places_on_wire(pairs: Tensor, block: ExpertBlock, wire: Wire) -> RowPlaces | None:
    """The places of the rows, if the codecs of the wire move them; None if rows are moved before and after it.

    Codecs do not draw random numbers, and do not multiply rows before the experts.
    """
    if not wire.fused or block.prescaled or wire.quantiser is None or wire.quantiser.formats_to_nearest() is None:
        return None
    numbers = torch.arange(len(pairs), device=pairs.device)
    return RowPlaces(torch.empty_like(pairs).scatter_(0, pairs, numbers).view(-1, block.top_k))


def _moving_codecs(places: RowPlaces, formats: WireFormats, scores: Tensor) -> Codecs:
    """The codecs of all directions; ``scores [tokens, top_k]`` multiply the outputs of the experts."""
    return Codecs(
        dispatch=ToExperts(places, formats.dispatch),
        combine=FromExperts(places, formats.combine, scores),
        dispatch_grad=FromExperts(places, formats.dispatch_grad),
        combine_grad=ToExperts(places, formats.combine_grad, scores),
    )


def _moves(pairs: Tensor, top_k: int, fused: bool) -> tuple[_Move, _Move]:
    """``permute`` and ``unpermute`` between tokens ``[tokens, hidden]`` and rows ``[tokens * top_k, hidden]``.

    Each function takes the tensor to move, and the weights ``[tokens, top_k]`` of the rows or None.
    """
    if not fused:
        reference = {"order": pairs, "top_k": top_k}
        return partial(rows_reference.permute, **reference), partial(rows_reference.unpermute, **reference)
    from fcsd.kernels import rows  # loads Triton

    row_of = rows.row_numbers(pairs, top_k)
    return partial(rows.permute, row_of=row_of), partial(rows.unpermute, row_of=row_of)


def _plan(matrix: list[list[int]], rank: int, counts: Tensor) -> _Plan:
    """The plan of ``rank``.

    Args:
        matrix: how many rows each rank sends to each rank, ``matrix[sender][receiver]``.
        rank: this rank.
        counts: the same numbers for each slot of the receiver, ``[senders, receivers, slots]``.
    """
    transposed = [list(column) for column in zip(*matrix, strict=True)]
    return _Plan(splits_of(matrix, rank), splits_of(transposed, rank), counts[:, rank])
