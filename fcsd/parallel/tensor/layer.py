"""Trains a tensor-parallel model with its sums in flight, by the plans of ``models/schedule.py``.

transformers' own loop over layers and its own modules compute everything, as in ``fcsd/engine/layer.py``. A layer
passes on a ``SummedStream``. In the forward pass, a sum over the ranks starts when its last output is computed, and the
first read that includes it awaits it. In the backward pass, the sum of the gradients of a sub-block's input starts when
the sub-block's backward pass has run, and is awaited last (``sums``).

A ``SummedStream`` never changes, because activation checkpointing runs a layer again on the stream that it got before.
A recompute sends only the sums that it reads itself, which under ladder are none.
"""

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
    unwire_layers,
    wired_class,
)
from fcsd.parallel import order
from fcsd.parallel.overlap import InFlight
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
class LayerSums(LayerWiring):
    """A layer's place in the schedule.

    Attributes:
        index: 0-based index of the decoder layer.
        plan: what the layer does.
        sums: how the sums of the model travel.
        distance: under how many earlier sub-blocks the sum of an input's gradient can run.
    """

    index: int
    plan: LayerPlan
    sums: TrainingSums
    distance: int


class TrainedTensorLayer(WiredLayer):
    """A decoder layer with sharded weights. It passes on a ``SummedStream``, and the last layer a tensor."""

    fcsd: LayerSums

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        _refuse_reentrant(self)
        if _active_collector.get():
            raise ConfigError("a tensor-parallel model does not return the outputs of single layers")
        own, plan = self.fcsd, self.fcsd.plan
        stream = hidden_states if isinstance(hidden_states, SummedStream) else self._first(hidden_states)
        parts = own.parts(self)
        assert parts.attn is not None, "ranks do not share layers with one sub-block"
        x, stream = self._read("attn", stream, plan.attn)
        stream = self._add(0, parts.attn(x, **kwargs), stream)
        x, stream = self._read("mlp", stream, plan.mlp)
        for number, part in enumerate((part for part in (parts.shared, parts.routed) if part is not None), 1):
            stream = self._add(number, part(x), stream)
        if order.in_backward():
            # A recompute must save all tensors inside this layer, in the order in which the first pass saved them.
            stream.land()
        return stream if plan.hands_on is None else stream.land()

    def _first(self, x: Tensor) -> SummedStream:
        """The stream of the embeddings ``[batch, seq, hidden]``."""
        # Two sums that are awaited at one place would be awaited in any order, so the places differ from the beginning.
        places = range(self.fcsd.distance if torch.is_grad_enabled() else 0)
        return SummedStream(x, begun=tuple(order.mark() for _ in places))

    def _read(
        self, by: Literal["attn", "mlp"], stream: SummedStream, places: Sequence[int]
    ) -> tuple[Tensor, SummedStream]:
        """What a sub-block computes from, and the stream that is left."""
        own = self.fcsd
        stream = stream.read(places)
        x = own.blocks.read(self, by, stream.landed)
        awaited_at = stream.begun[0] if stream.begun else None
        begun = (*stream.begun[1:], order.mark()) if stream.begun else ()
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
    model: PreTrainedModel, wiring: Wiring, ranks: TensorGroup, mode: Mode = "on", backend: str = "nccl"
) -> None:
    """Wire a model whose weights are sharded for training, in place. The call can be repeated on one model.

    Args:
        model: see ``shard.prepare``.
        wiring: any wiring but Desync.
        mode: see ``TrainingSums``; outputs and gradients are the same in every bit.
        backend: see ``TrainingSums``.

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
    sums, distance = TrainingSums(ranks, mode, backend), max(1, *wiring.reads)
    for index, layer in enumerate(layers):
        layer.__class__ = wired_class(TrainedTensorLayer, type(layer))
        layer.fcsd = LayerSums(0, 0, 1, False, parts, blocks, index, plans[index], sums, distance)
