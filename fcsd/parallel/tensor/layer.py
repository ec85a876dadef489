"""Trains a tensor-parallel model with its sums in flight, by the plans of ``models/schedule.py``.

transformers' own loop over layers and its own modules compute everything, as in ``fcsd/engine/layer.py``. A layer
passes on a ``SummedStream``. In the forward pass, a sum over the ranks starts when its last output is computed, and the
first read that includes it awaits it. In the backward pass, the sum of the gradients of a sub-block's input starts when
the sub-block's backward pass has run, and is awaited last (``sums``).

A ``SummedStream`` never changes, because activation checkpointing runs a layer again on the stream that it got before.
A recompute sends only the sums that it reads itself, which under ladder are none.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers, experts_of
from fcsd.models.config_keys import cache_keyword
from fcsd.models.schedule import PlannedWiring, Running, plans_of, run_step
from fcsd.models.wiring import (
    DESYNC,
    WiredLayer,
    Wiring,
    _refuse_reentrant,
    hf_parts,
    mixer,
    mlp_of,
    unwire_layers,
    wired_class,
)
from fcsd.parallel import order, process_settings
from fcsd.parallel.all_reduce.reduce import Reduction
from fcsd.parallel.overlap import InFlight
from fcsd.parallel.tensor.products import compute_weights_at, split_products
from fcsd.parallel.tensor.shard import check_desync, mark_partial
from fcsd.parallel.tensor.sums import Mode, TrainingSums, column_input, partial_output
from fcsd.parallel.tensor.tp_plan import TensorGroup


@dataclass(frozen=True)
class SummedStream:
    """The residual stream of one forward pass on one rank, between two sub-blocks.

    Attributes:
        landed: what the last read has included, ``[batch, seq, hidden]``; None if the only sum in flight includes it.
        shape: ``[batch, seq, hidden]``.
        in_flight: the sums that no read has included yet, oldest first.
        collected: outputs of this rank that wait for others with which they share a sum.
        begun: the places at which the last sub-blocks began, oldest first, from ``order.mark``. There are as many as
            the distance of the wiring, and none without gradients.
        local: whether ``landed`` is the rank's own. Under Desync the streams of the ranks differ between two sums.
    """

    landed: Tensor | None
    shape: torch.Size
    in_flight: tuple[InFlight, ...] = ()
    collected: Tensor | None = None
    begun: tuple[int, ...] = ()
    local: bool = False

    def read(self, places: Sequence[int]) -> "SummedStream":
        """The stream with the sums at ``places`` among those in flight, which are awaited."""
        landed = self.landed
        for place in places:
            arrived = self.in_flight[place].land()
            landed = arrived if landed is None else landed + arrived
        left = tuple(sum_ for place, sum_ in enumerate(self.in_flight) if place not in places)
        return replace(self, landed=landed, in_flight=left)

    def land(self) -> Tensor:
        """The full stream ``[batch, seq, hidden]``, as the final norm reads it."""
        landed = self.read(range(len(self.in_flight))).landed
        assert landed is not None
        return landed


@dataclass(frozen=True)
class RowGroups:
    """The streams of groups of rows. While the sum of one group is in flight, the next group is computed.

    The rows of a forward pass without gradients are parted, because the wiring of a teacher hides no sum.
    """

    streams: tuple[SummedStream, ...]

    def land(self) -> Tensor:
        """The full stream ``[batch, seq, hidden]`` of all rows."""
        landed = [stream.land() for stream in self.streams]
        return landed[0] if len(landed) == 1 else torch.cat(landed)

    def of_rows(self, group: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What transformers' loop passes to a layer, for the rows of one group."""
        if len(self.streams) == 1:
            return kwargs
        counts = [stream.shape[0] for stream in self.streams]
        first, rows = sum(counts[:group]), counts[group]

        def part(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(part, value))
            has_rows = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == sum(counts)
            return value[first : first + rows] if has_rows else value

        found = {name: part(value) for name, value in kwargs.items()}
        if "borders" in kwargs:
            # Documents of other groups become empty ones. The host need not know how many there are.
            seq = self.streams[0].shape[1]
            found["borders"] = (kwargs["borders"] - first * seq).clamp(0, rows * seq)
        return found


@dataclass(frozen=True)
class TrainedWiring(PlannedWiring):
    """A layer's place in the schedule.

    Attributes:
        sums: how the sums of the model travel.
        distance: under how many earlier sub-blocks the sum of an input's gradient can run.
        exposed: whether the wiring leaves any sum of the model exposed. A forward pass without gradients then computes
            its rows in two groups.
    """

    sums: TrainingSums
    distance: int
    exposed: bool

    @property
    def local(self) -> set[str]:
        """The sub-blocks that compute from the rank's own stream: those whose outputs Desync does not sum alone."""
        steps = enumerate(self.plan.steps)
        return {"mlp" if number else "attn" for number, step in steps if step.then in ("local", "resync")}


class TrainedTensorLayer(WiredLayer):
    """A decoder layer with sharded weights. It passes on a ``SummedStream``, and the last layer a tensor."""

    fcsd: TrainedWiring

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        _refuse_reentrant(self)
        if _active_collector.get():
            raise ConfigError("a tensor-parallel model does not return the outputs of single layers")
        plan, parts = self.fcsd.plan, self.fcsd.parts(self)
        assert parts.attn is not None, "ranks do not share layers with one sub-block"
        # The embeddings, and what a prefix of layers returned, are full streams with nothing in flight.
        full = not isinstance(hidden_states, RowGroups)
        groups = self._first(hidden_states, kwargs) if full else hidden_states
        streams = list(groups.streams)
        mlp = parts.shared
        assert mlp is not None, "a model with experts is not trained by tensor parallelism"
        for group, stream in enumerate(streams):
            x, stream = self._read("attn", stream, () if full else plan.attn)
            attn = partial(parts.attn, x, **groups.of_rows(group, kwargs))
            streams[group] = self._add(0, attn(), stream)
        for group, stream in enumerate(streams):
            x, stream = self._read("mlp", stream, plan.mlp)
            streams[group] = self._add(1, mlp(x), stream)
        groups = replace(groups, streams=tuple(streams))
        if order.in_backward():
            # A recompute must save all tensors inside this layer, in the order in which the first pass saved them.
            for stream in streams:
                stream.read(range(len(stream.in_flight)))
        return groups if plan.hands_on is None else groups.land()

    def _first(self, x: Tensor, kwargs: dict[str, Any]) -> RowGroups:
        """The streams of a full one ``[batch, seq, hidden]``."""
        whole = torch.is_grad_enabled() or kwargs.get(cache_keyword()) is not None
        count = 2 if self.fcsd.exposed and not whole and len(x) > 1 else 1
        # Two sums that are awaited at one place would be awaited in any order, so the places differ from the beginning.
        places = range(self.fcsd.distance if torch.is_grad_enabled() else 0)
        begun = tuple(order.mark() for _ in places)
        return RowGroups(tuple(SummedStream(rows, rows.shape, begun=begun) for rows in x.tensor_split(count)))

    def _read(
        self, by: Literal["attn", "mlp"], stream: SummedStream, places: Sequence[int]
    ) -> tuple[Tensor, SummedStream]:
        """What a sub-block computes from, and the stream that is left."""
        own, stream = self.fcsd, stream.read(places)
        awaited_at, begun, weights_at = None, (), None
        if stream.begun:
            awaited_at, begun = stream.begun[0], (*stream.begun[1:], order.mark())
            weights_at = order.mark()
            if not own.sums.orders:
                awaited_at = begun[-1]  # behind the weight gradients, before all earlier sub-blocks
        if own.sums.mode == "off":
            awaited_at = None
        part = (mixer if by == "attn" else mlp_of)(own.blocks, self)
        compute_weights_at(part, None if own.sums.mode == "off" else weights_at)
        stream = replace(stream, begun=begun)
        x = stream.landed
        assert x is not None, "the sum that includes the stream is awaited by the next read"
        if by in own.local:
            # All that the rank computes from its own stream has the rank's own gradient, up to here.
            if not stream.local:
                x = column_input(x, own.sums, own.index, awaited_at)
            return own.blocks.read(self, by, x), replace(stream, landed=x, local=True)
        return column_input(own.blocks.read(self, by, x), own.sums, own.index, awaited_at), stream

    def _add(self, number: int, out: Tensor, stream: SummedStream) -> SummedStream:
        """The stream after the output of the call that has this number in the layer's plan."""
        own, step = self.fcsd, self.fcsd.plan.steps[number]
        arrive: Callable[[Tensor], Tensor] = partial(own.blocks.arrive, self, "mlp" if number else "attn")
        running, sent = run_step(step, out, Running(stream.landed, stream.collected), arrive, own.sums.ranks.degree)
        stream = replace(stream, landed=running.landed, collected=running.collected)
        if sent is None:
            return stream
        if sent.how == "local":
            return replace(stream, in_flight=(*stream.in_flight, InFlight(lambda: arrive(sent.out))))
        if not sent.arrives:
            assert not stream.in_flight, "a reduction of Desync replaces all that the rank has added"
            stream, arrive = replace(stream, local=False), _given
        read_here = number == 0 and len(stream.in_flight) in own.plan.mlp
        if order.in_backward() and not read_here and not own.blocks.normed:
            # No tensor that a recompute saves depends on the sum.
            wait: Callable[[], Tensor] = partial(_given, sent.out)
        else:
            wait = partial_output(sent.out, own.sums, own.index).wait
            if own.sums.waits:
                wait = partial(_given, wait())
        return replace(stream, in_flight=(*stream.in_flight, InFlight(lambda: arrive(wait()))))


def _given(x: Tensor) -> Tensor:
    return x


def ranks_of(model: PreTrainedModel) -> TensorGroup | None:
    """The ranks that shard a model that ``wire_training`` has wired; None for every other model."""
    first: Any = decoder_layers(model)[0]
    return first.fcsd.sums.ranks if isinstance(first, TrainedTensorLayer) else None


def wire_training(
    model: PreTrainedModel, wiring: Wiring, ranks: TensorGroup, mode: Mode = "on", backend: str = "nccl"
) -> None:
    """Wire a model whose weights are sharded for training, in place. The call can be repeated on one model.

    Args:
        model: see ``shard.prepare``.
        wiring: any wiring; a Desync wiring for as many ranks.
        mode: see ``TrainingSums``; outputs and gradients are the same in every bit, and so are the groups of rows.
        backend: see ``TrainingSums``. All ranks open it here, together.

    Raises:
        ConfigError: the model has experts, the wiring does not fit the model or the ranks, or these cannot sum so.
    """
    if experts_of(model.config):
        raise ConfigError("tensor-parallel training does not support models with experts", "set parallel.tp_size: 1")
    if wiring.name in DESYNC:
        check_desync(wiring.name, wiring.tp_degree, ranks.degree)
    layers: Any = decoder_layers(model)
    blocks = arch_of(model.config).blocks
    parts = partial(hf_parts, blocks)
    plans = plans_of(layers, parts, wiring, blocks)
    unwire_layers(layers)
    split_products(model)
    if mode == "on" and model.device.type == "cuda":
        process_settings.warn(os.environ)
    sums = TrainingSums(ranks, mode, backend)
    if ranks.degree > 1:
        Reduction(ranks.group, backend, 0)
    distance = 1 if wiring.name in DESYNC else max(1, *wiring.reads)
    exposed = ranks.degree > 1 and any(step.then == "now" for plan in plans.values() for step in plan.steps)
    for index, layer in enumerate(layers):
        layer.__class__ = wired_class(TrainedTensorLayer, type(layer))
        place = index, plans[index], sums, distance, exposed
        layer.fcsd = TrainedWiring(0, 0, 1, False, parts, blocks, *place)
        for by, norms in (("attn", blocks.attn_norms), ("mlp", blocks.mlp_norms)):
            for name in filter(None, norms):
                mark_partial(layer.get_submodule(name), by in layer.fcsd.local)
