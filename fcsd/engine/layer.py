"""Runs a tensor-parallel model with its reductions in flight, as ``models/schedule.py`` says.

transformers' own loop over layers and its own modules compute everything. A layer passes on a ``Stream`` instead of a
tensor. The stream starts a reduction when the last output that it sums is computed, and awaits it at the first read
that includes it. The reads of a model include ever more outputs, so one running sum is enough for every wiring:

    a read of the stream = all outputs whose reductions have been awaited, up to this read

An output is normed or multiplied, where the architecture does so, when its sum has arrived.

Under Desync every rank adds its own outputs to its own residual. A kept reduction sums ``output + residual / degree``
over the ranks (Ladder-Residual §5), and its result replaces the residual.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fcsd.engine import compiled
from fcsd.engine.tp_plan import TensorGroup
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.schedule import Output, Part, Read, Reduction, kind_of, reductions
from fcsd.models.wiring import (
    DESYNC,
    LayerWiring,
    Parts,
    WiredLayer,
    Wiring,
    hf_parts,
    unwire_layers,
    wired_class,
)
from fcsd.parallel.all_reduce import reduce


@dataclass(frozen=True)
class Schedule:
    """The reductions of a model, and how they travel.

    Attributes:
        starts: maps the output after which a reduction starts to the reduction.
        last: the read of the final norm.
        ranks: the ranks that divide the model.
        kind: how the ranks reduce; see ``parallel.all_reduce.backends``.
        eager: whether every reduction is awaited where it starts. The code is the same, but nothing overlaps.
        desync: whether the residuals of the ranks differ between reductions.
        compiled: whether the parts of a decoding step with a cache of fixed shape are compiled.
    """

    starts: Mapping[Output, Reduction]
    last: Read
    ranks: TensorGroup
    kind: reduce.Kind
    eager: bool
    desync: bool
    compiled: bool


class Stream:
    """The residual stream of one forward pass on one rank, and its reductions in flight.

    Args:
        x: the embeddings ``[batch, seq, hidden]``.
        schedule: the model's reductions.
    """

    def __init__(self, x: Tensor, schedule: Schedule) -> None:
        self._x = x
        self._schedule = schedule
        self._computed: dict[Output, Tensor] = {}
        self._in_flight: list[tuple[Read, Callable[[], Tensor]]] = []

    def add(self, output: Output, value: Tensor, arrive: Callable[[Tensor], Tensor]) -> None:
        """Take this rank's partial sum of an output.

        Args:
            output: what was computed.
            value: the partial sum ``[batch, seq, hidden]``, whose memory may be written over.
            arrive: what the layer does with the sum over the ranks before it is added to the stream. Outputs that share
                a reduction have the same one, and under Desync, it acts on a part of an output as on the whole.
        """
        reduction = self._schedule.starts.get(output)
        if self._schedule.desync:
            value = arrive(value)
            if reduction is None:
                self._x = self._x + value
                return
            value = value + self._x / self._schedule.ranks.degree
        else:
            self._computed[output] = value
            if reduction is None:
                return
            value = self._computed.pop(reduction.sums[0])
            for summand in reduction.sums[1:]:
                value = value + self._computed.pop(summand)
        started = reduce.reduce(value, self._schedule.ranks.group, self._schedule.kind, output.layer)
        wait = started.wait
        if self._schedule.eager:
            wait = partial(_given, started.wait())
        arrived = wait if self._schedule.desync else lambda: arrive(wait())
        self._in_flight.append((reduction.awaited_by, arrived))

    def read(self, place: Read) -> Tensor:
        """The stream ``[batch, seq, hidden]`` as ``place`` reads it; awaits the reductions that it needs first."""
        waiting, self._in_flight = self._in_flight, []
        for awaited_by, wait in waiting:
            if awaited_by != place:
                self._in_flight.append((awaited_by, wait))
            elif self._schedule.desync:
                self._x = wait()
            else:
                self._x = self._x + wait()
        return self._x


def _given(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class LayerReductions(LayerWiring):
    """A layer's place in the schedule.

    Attributes:
        index: 0-based index of the decoder layer.
        schedule: the schedule of the whole model.
    """

    index: int
    schedule: Schedule


class TensorParallelLayer(WiredLayer):
    """A decoder layer whose parts compute partial sums. It passes on a ``Stream``, and the last layer a tensor."""

    fcsd: LayerReductions

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        if _active_collector.get():
            raise ConfigError("a tensor-parallel model does not return the outputs of single layers")
        plan = self.fcsd
        stream = hidden_states if isinstance(hidden_states, Stream) else Stream(hidden_states, plan.schedule)
        parts = plan.parts(self)
        if plan.schedule.compiled and compiled.possible(kwargs.get("past_key_values"), plan.index):
            self._compiled_step(stream, parts, **kwargs)
        else:
            x = plan.blocks.read(self, "attn", stream.read(Read(plan.index, "attn")))
            self._add(stream, "attn", parts.attn(x, **kwargs))
            x = plan.blocks.read(self, "mlp", stream.read(Read(plan.index, "mlp")))
            self._add_mlp(stream, x, parts)
        last = plan.schedule.last
        return stream.read(last) if plan.index + 1 == last.layer else stream

    def _add_mlp(self, stream: Stream, x: Tensor, parts: Parts) -> None:
        if parts.shared is not None:
            self._add(stream, "shared", parts.shared(x))
        if parts.routed is not None:
            self._add(stream, "routed", parts.routed(x))

    def _add(self, stream: Stream, part: Part, value: Tensor) -> None:
        by = "attn" if part == "attn" else "mlp"
        stream.add(Output(self.fcsd.index, part), value, partial(self.fcsd.blocks.arrive, self, by))

    def _compiled_step(self, stream: Stream, parts: Parts, **kwargs: Any) -> None:
        index, blocks = self.fcsd.index, self.fcsd.blocks
        attn_norm, mlp_norm = (
            nn.Identity() if name is None else getattr(self, name)
            for name in (blocks.attn_norms[0], blocks.mlp_norms[0])
        )
        x = stream.read(Read(index, "attn"))
        self._add(stream, "attn", compiled.attend(attn_norm, self.self_attn, x, **kwargs))
        x = stream.read(Read(index, "mlp"))
        if parts.routed is None:
            assert isinstance(parts.shared, nn.Module), "the only part of a dense MLP is its module"
            self._add(stream, "shared", compiled.dense(mlp_norm, parts.shared, x))
        else:
            self._sparse_step(stream, parts.routed, mlp_norm, x)

    def _sparse_step(self, stream: Stream, routed: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> None:
        """The step of a sparse MLP. A router that does more than transformers' own is left to ``routed``."""
        blocks = self.fcsd.blocks
        mlp: Any = self.get_submodule(blocks.mlp)
        router = mlp.get_submodule(blocks.router)
        shared, gate = (mlp.get_submodule(name) if name else None for name in (blocks.shared, blocks.shared_gate))
        if blocks.prescaled or router._forward_hooks:
            router = None
        found = compiled.before_experts(norm, compiled.Sparse(router, shared, gate), x)
        if found.shared is not None:
            self._add(stream, "shared", found.shared)
        if router is None:
            out = routed(found.read)
        else:
            out = mlp.experts(found.read.flatten(0, -2), found.chosen, found.weights).view_as(x)
        self._add(stream, "routed", out)


def wire_tensor_parallel(
    model: PreTrainedModel,
    wiring: Wiring,
    ranks: TensorGroup,
    kind: reduce.Kind = "nccl",
    eager: bool = False,
    compile_steps: bool = False,
) -> None:
    """Wire a model whose weights are divided (``weights.py``), in place. The call can be repeated on one model.

    Args:
        wiring: any wiring that fits the model, Desync with a degree that is the number of ranks.
        ranks: the ranks that divide the model.
        kind: how the ranks reduce; see ``parallel.all_reduce.backends``.
        eager: whether every reduction is awaited where it starts; the results are the same, bit for bit.
        compile_steps: whether to compile the parts of decoding steps in slots, see ``compiled``; the results are the
            same up to rounding.

    Raises:
        ConfigError: the wiring does not fit the model or the number of ranks.
    """
    if wiring.name in DESYNC and wiring.tp_degree != ranks.degree:
        raise ConfigError(
            f"a {wiring.name} model of degree {wiring.tp_degree} cannot run on {ranks.degree} tensor-parallel ranks",
            hint=f"use {wiring.tp_degree} GPUs, or the backend hf, which runs it on one",
        )
    layers: Any = decoder_layers(model)
    unwire_layers(layers)
    blocks = arch_of(model.config).blocks
    parts = partial(hf_parts, blocks)
    try:
        found = reductions(wiring, [kind_of(parts(layer)) for layer in layers], blocks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    starts = {reduction.starts_after: reduction for layer in found for reduction in layer}
    schedule = Schedule(starts, Read(len(layers), "norm"), ranks, kind, eager, wiring.name in DESYNC, compile_steps)
    for index, layer in enumerate(layers):
        layer.__class__ = wired_class(TensorParallelLayer, type(layer))
        layer.fcsd = LayerReductions(0, 0, 1, False, parts, blocks, index, schedule)
