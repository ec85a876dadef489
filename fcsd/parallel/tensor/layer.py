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
from fcsd.models.schedule import Kind, LayerPlan, kind_of, layer_plans
from fcsd.models.wiring import (
    DESYNC,
    LayerWiring,
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
from fcsd.parallel.overlap import InFlight
from fcsd.parallel.tensor.products import compute_weights_at, split_products
from fcsd.parallel.tensor.sums import Mode, TrainingSums, column_input, partial_output
from fcsd.parallel.tensor.tp_plan import TensorGroup


@dataclass(frozen=True)
class SummedStream:
    """The residual stream of one forward pass on one rank, between two sub-blocks.

    Attributes:
        landed: what the last read has included, ``[batch, seq, hidden]``.
        in_flight: the sums that no read has included yet, oldest first.
        collected: outputs of this rank that wait for others with which they share a sum.
        begun: the places at which the last sub-blocks began, oldest first, from ``order.mark``. There are as many as
            the distance of the wiring, and none without gradients.
    """

    landed: Tensor
    in_flight: tuple[InFlight, ...] = ()
    collected: Tensor | None = None
    begun: tuple[int, ...] = ()

    def read(self, places: Sequence[int]) -> "SummedStream":
        """The stream with the sums at ``places`` among those in flight, which are awaited."""
        landed = self.landed
        for place in places:
            landed = landed + self.in_flight[place].land()
        left = tuple(sum_ for place, sum_ in enumerate(self.in_flight) if place not in places)
        return replace(self, landed=landed, in_flight=left)

    def land(self) -> Tensor:
        """The full stream ``[batch, seq, hidden]``, as the final norm reads it."""
        return self.read(range(len(self.in_flight))).landed


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
        counts = [stream.landed.shape[0] for stream in self.streams]
        first, rows = sum(counts[:group]), counts[group]

        def part(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(part, value))
            has_rows = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == sum(counts)
            return value[first : first + rows] if has_rows else value

        found = {name: part(value) for name, value in kwargs.items()}
        if "borders" in kwargs:
            # Documents of other groups become empty ones. The host need not know how many there are.
            seq = self.streams[0].landed.shape[1]
            found["borders"] = (kwargs["borders"] - first * seq).clamp(0, rows * seq)
        return found


@dataclass(frozen=True)
class LayerSums(LayerWiring):
    """A layer's place in the schedule.

    Attributes:
        index: 0-based index of the decoder layer.
        plan: what the layer does.
        sums: how the sums of the model travel.
        distance: under how many earlier sub-blocks the sum of an input's gradient can run.
        row_groups: in how many groups the rows of a forward pass without gradients are computed.
    """

    index: int
    plan: LayerPlan
    sums: TrainingSums
    distance: int
    row_groups: int


class TrainedTensorLayer(WiredLayer):
    """A decoder layer with sharded weights. It passes on a ``SummedStream``, and the last layer a tensor."""

    fcsd: LayerSums

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        _refuse_reentrant(self)
        if _active_collector.get():
            raise ConfigError("a tensor-parallel model does not return the outputs of single layers")
        plan, parts = self.fcsd.plan, self.fcsd.parts(self)
        groups = hidden_states if isinstance(hidden_states, RowGroups) else self._first(hidden_states, kwargs)
        streams = list(groups.streams)
        for group, stream in enumerate(streams):
            x, stream = self._read("attn", stream, plan.attn)
            streams[group] = self._add(0, parts.attn(x, **groups.of_rows(group, kwargs)), stream)
        for group, stream in enumerate(streams):
            x, stream = self._read("mlp", stream, plan.mlp)
            for number, part in enumerate((part for part in (parts.shared, parts.routed) if part is not None), 1):
                stream = self._add(number, part(x), stream)
            streams[group] = stream
        groups = replace(groups, streams=tuple(streams))
        if order.in_backward():
            # A recompute must save all tensors inside this layer, in the order in which the first pass saved them.
            groups.land()
        return groups if plan.hands_on is None else groups.land()

    def _first(self, x: Tensor, kwargs: dict[str, Any]) -> RowGroups:
        """The streams of the embeddings ``[batch, seq, hidden]``."""
        if torch.is_grad_enabled() or kwargs.get("past_key_values") is not None:
            count = 1
        else:
            count = min(self.fcsd.row_groups, x.shape[0])
        # Two sums that are awaited at one place would be awaited in any order, so the places differ from the beginning.
        places = range(self.fcsd.distance if torch.is_grad_enabled() else 0)
        begun = tuple(order.mark() for _ in places)
        return RowGroups(tuple(SummedStream(rows, begun=begun) for rows in x.tensor_split(count)))

    def _read(
        self, by: Literal["attn", "mlp"], stream: SummedStream, places: Sequence[int]
    ) -> tuple[Tensor, SummedStream]:
        """What a sub-block computes from, and the stream that is left."""
        own = self.fcsd
        stream = stream.read(places)
        x = own.blocks.read(self, by, stream.landed)
        awaited_at, begun, weights_at = None, (), None
        if stream.begun:
            awaited_at, begun = stream.begun[0], (*stream.begun[1:], order.mark())
            weights_at = order.mark()
        if not own.sums.orders:
            awaited_at = None
        part = (mixer if by == "attn" else mlp_of)(own.blocks, self)
        compute_weights_at(part, None if own.sums.mode == "off" else weights_at)
        return column_input(x, own.sums, own.index, awaited_at), replace(stream, begun=begun)

    def _add(self, number: int, out: Tensor, stream: SummedStream) -> SummedStream:
        """The stream after the output of the call that has this number in the layer's plan."""
        own, step = self.fcsd, self.fcsd.plan.steps[number]
        if step.joins:
            assert stream.collected is not None, "the first output of a sum is collected"
            out, stream = stream.collected + out, replace(stream, collected=None)
        if step.then == "collect":
            return replace(stream, collected=out)
        arrive = partial(own.blocks.arrive, self, "mlp" if number else "attn")
        read_here = number == 0 and len(stream.in_flight) in own.plan.mlp
        if order.in_backward() and not read_here and not own.blocks.normed:
            wait: Callable[[], Tensor] = partial(_given, out)  # no tensor that a recompute saves depends on the sum
        else:
            wait = partial_output(out, own.sums, own.index).wait
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
    model: PreTrainedModel,
    wiring: Wiring,
    ranks: TensorGroup,
    mode: Mode = "on",
    backend: str = "nccl",
    row_groups: int = 2,
) -> None:
    """Wire a model whose weights are sharded for training, in place. The call can be repeated on one model.

    Args:
        model: see ``shard.prepare``.
        wiring: any wiring but Desync.
        mode: see ``TrainingSums``; outputs and gradients are the same in every bit.
        backend: see ``TrainingSums``.
        row_groups: in how many groups the rows of a forward pass without gradients are computed, if the wiring leaves
            any sum exposed. The mode has no effect on it, so that all modes give the same bits.

    Raises:
        ConfigError: the model has experts, or the wiring is Desync or does not fit the model.
    """
    if experts_of(model.config):
        raise ConfigError("tensor-parallel training does not support models with experts", "set parallel.tp_size: 1")
    if wiring.name in DESYNC:
        raise ConfigError(f"tensor-parallel training does not support {wiring.name}", "set parallel.tp_size: 1")
    layers: Any = decoder_layers(model)
    blocks = arch_of(model.config).blocks
    parts = partial(hf_parts, blocks)
    try:
        kinds: list[Kind] = [kind_of(parts(layer)) for layer in layers]
        plans = layer_plans(wiring, kinds, range(len(layers)), every=True, blocks=blocks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    unwire_layers(layers)
    split_products(model)
    if mode == "on" and model.device.type == "cuda":
        process_settings.warn(os.environ)
    sums, distance = TrainingSums(ranks, mode, backend), max(1, *wiring.reads)
    if ranks.degree == 1 or not any(step.then == "now" for plan in plans.values() for step in plan.steps):
        row_groups = 1
    for index, layer in enumerate(layers):
        layer.__class__ = wired_class(TrainedTensorLayer, type(layer))
        layer.fcsd = LayerSums(0, 0, 1, False, parts, blocks, index, plans[index], sums, distance, row_groups)
