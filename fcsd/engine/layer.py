"""Runs a tensor-parallel model with its reductions in flight, by the plans of ``models/schedule.py``.

transformers' own loop over layers and its own modules compute everything. A layer passes on a ``Stream`` instead of a
tensor. The stream does with each output what the layer's plan says, and awaits a reduction at the first read that
includes it.

An output is normed or multiplied, where the architecture does so, when its sum has arrived.

Under Desync every rank adds its own outputs to its own residual. A kept reduction sums ``output + residual / degree``
over the ranks (Ladder-Residual §5), and its result replaces the residual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.schedule import PlannedWiring, Running, Step, plans_of, run_step
from fcsd.models.wiring import (
    DESYNC,
    WiredLayer,
    Wiring,
    hf_parts,
    unwire_layers,
    wired_class,
)
from fcsd.parallel.all_reduce import reduce
from fcsd.parallel.all_reduce.backends import backend_of
from fcsd.parallel.tensor.tp_plan import TensorGroup


@dataclass(frozen=True)
class Sums:
    """How the reductions of a model travel.

    Attributes:
        ranks: the ranks that divide the model.
        reduce: how the ranks reduce, one of ``parallel.all_reduce.backends``.
    """

    ranks: TensorGroup
    reduce: str


class Stream:
    """The residual stream of one forward pass on one rank, and its reductions in flight.

    Args:
        x: the embeddings ``[batch, seq, hidden]``.
    """

    def __init__(self, x: Tensor, sums: Sums) -> None:
        self._running = Running(x, None)
        self._sums = sums
        self._leaving: tuple[SummedWiring, Any, Tensor | None] | None = None  # see ``leave``
        self._in_flight: list[Callable[[], Tensor]] = []  # oldest first; each returns its sum when it has arrived

    def add(self, step: Step, layer: int, out: Tensor, arrive: Callable[[Tensor], Tensor]) -> None:
        """Do with this rank's output of a call what the step says; see ``run_step``.

        Args:
            layer: 0-based index of the decoder layer.
            out: the output ``[batch, seq, hidden]``, which may be written over.
        """
        ranks = self._sums.ranks
        self._running, sent = run_step(step, out, self._running, arrive, ranks.degree)
        if sent is None:
            return
        if sent.how == "local":
            self._in_flight.append(partial(_given, arrive(sent.out)))
            return
        wait = reduce.reduce(sent.out, ranks.group, self._sums.reduce, layer).wait
        self._in_flight.append((lambda: arrive(wait())) if sent.arrives else wait)

    def read(self, places: Sequence[int]) -> Tensor:
        """The stream ``[batch, seq, hidden]`` with the sums at ``places`` among those in flight, which are awaited."""
        for place in places:
            landed, total = self._running.landed, self._in_flight[place]()
            self._running = self._running._replace(landed=total if landed is None else landed + total)
        self._in_flight = [wait for n, wait in enumerate(self._in_flight) if n not in places]
        landed = self._landed
        if self._leaving is not None:
            (own, layer, given), self._leaving = self._leaving, None
            (landed,) = own.blocks.leave(layer, [landed], given)
            self._running = self._running._replace(landed=landed)
            # A sum that this read does not include is no input of what the layer adds, but it leaves the layer, too.
            self._in_flight = [partial(_left, own, layer, wait) for wait in self._in_flight]
        return landed

    @property
    def _landed(self) -> Tensor:
        landed = self._running.landed
        assert landed is not None, "a read under Desync lands what was added before it"
        return landed

    def leave(self, own: "SummedWiring", layer: Any, given: Tensor | None) -> None:
        """Let the stream leave a layer, see ``Blocks.leave``, as soon as the next read has landed what it includes.

        Args:
            own: the layer's place in the schedule.
            given: its features of the tokens ``[batch, seq, width]``, if it has any.
        """
        self._leaving = own, layer, given

    @property
    def shape(self) -> torch.Size:
        """``[batch, seq, hidden]``. transformers' loop over layers may cut tokens off, as it would of a tensor."""
        return self._landed.shape

    def __getitem__(self, place: Any) -> "Stream":
        cut = Stream(self._landed[place], self._sums)
        cut._in_flight = [partial(_cut, place, wait) for wait in self._in_flight]
        if self._leaving is not None:
            own, layer, given = self._leaving
            cut._leaving = own, layer, None if given is None else given[place]
        return cut

    def whole(self) -> Tensor:
        """The stream with all sums, as the final norm reads it."""
        return self.read(range(len(self._in_flight)))


def _given(x: Tensor) -> Tensor:
    return x


def _left(own: "SummedWiring", layer: Any, wait: Callable[[], Tensor]) -> Tensor:
    return own.blocks.leave(layer, [wait()])[0]


def _cut(place: Any, wait: Callable[[], Tensor]) -> Tensor:
    return wait()[place]


@dataclass(frozen=True)
class SummedWiring(PlannedWiring):
    """A layer's place in the schedule; ``sums`` says how the reductions of the model travel."""

    sums: Sums


class TensorParallelLayer(WiredLayer):
    """A decoder layer whose parts compute partial sums. It passes on a ``Stream``, and the last layer a tensor."""

    fcsd: SummedWiring

    def forward(self, hidden_states: Any, given: Tensor | None = None, **kwargs: Any) -> Any:
        if _active_collector.get():
            raise ConfigError("a tensor-parallel model does not return the outputs of single layers")
        own, plan = self.fcsd, self.fcsd.plan
        stream = hidden_states if isinstance(hidden_states, Stream) else Stream(hidden_states, own.sums)
        parts = own.parts(self)
        assert parts.attn is not None, "layers with one sub-block have no plan"
        x = own.blocks.read(self, "attn", stream.read(plan.attn))
        self._add(stream, 0, parts.attn(x, **kwargs))
        x = own.blocks.read(self, "mlp", stream.read(plan.mlp))
        for number, part in enumerate((part for part in (parts.shared, parts.routed) if part is not None), 1):
            self._add(stream, number, part(x))
        if own.blocks.inputs is not None or own.blocks.scale is not None:
            stream.leave(own, self, given)
        return stream if plan.hands_on is None else stream.whole()

    def _add(self, stream: Stream, number: int, out: Tensor) -> None:
        """Add the output of the call that has this number in the layer's plan."""
        own = self.fcsd
        arrive = partial(own.blocks.arrive, self, "mlp" if number else "attn")
        stream.add(own.plan.steps[number], own.index, out, arrive)


def wire_tensor_parallel(model: PreTrainedModel, wiring: Wiring, ranks: TensorGroup, backend: str = "nccl") -> None:
    """Wire a model whose weights are divided (``weights.py``), in place. The call can be repeated on one model.

    Args:
        wiring: any wiring that fits the model, Desync with a degree that is the number of ranks.
        backend: how the ranks reduce, one of ``parallel.all_reduce.backends``.

    Raises:
        ConfigError: the wiring does not fit the model or the number of ranks, or a format of quantised reductions does
            not fit the width of the model.
    """
    if (format := backend_of(backend, "engine")[1]) is not None:
        format.row_bytes(model.config.get_text_config().hidden_size)
    if wiring.name in DESYNC and wiring.tp_degree != ranks.degree:
        raise ConfigError(
            f"a {wiring.name} model of degree {wiring.tp_degree} cannot run on {ranks.degree} tensor-parallel ranks",
            hint=f"use {wiring.tp_degree} GPUs, or the backend hf, which runs it on one",
        )
    layers: Any = decoder_layers(model)
    unwire_layers(layers)
    blocks = arch_of(model.config).blocks
    parts = partial(hf_parts, blocks)
    plans = plans_of(layers, parts, wiring, blocks)
    sums = Sums(ranks, backend)
    for index, layer in enumerate(layers):
        layer.__class__ = wired_class(TensorParallelLayer, type(layer), blocks.passes is not None)
        layer.fcsd = SummedWiring(0, 0, 1, False, parts, blocks, index, plans[index], sums)
