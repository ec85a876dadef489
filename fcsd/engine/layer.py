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
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fcsd.engine import compiled
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.installed import cache_keyword
from fcsd.models.schedule import Kind, LayerPlan, Step, kind_of, layer_plans
from fcsd.models.wiring import (
    DESYNC,
    LayerWiring,
    Parts,
    WiredLayer,
    Wiring,
    hf_parts,
    mlp_of,
    scaled,
    shared_of,
    unwire_layers,
    wired_class,
)
from fcsd.parallel.all_reduce import reduce
from fcsd.parallel.all_reduce.backends import backend_of
from fcsd.parallel.all_reduce.ways import Way, Ways
from fcsd.parallel.tensor.tp_plan import TensorGroup


@dataclass(frozen=True)
class Sums:
    """How the reductions of a model travel.

    Attributes:
        ranks: the ranks that divide the model.
        ways: how the ranks reduce in each step, and whether a reduction is awaited where it starts. The code is the
            same then, but nothing overlaps.
        compiled: whether the parts of a decoding step with a cache of fixed shape are compiled.
    """

    ranks: TensorGroup
    ways: Ways
    compiled: bool


class Stream:
    """The residual stream of one forward pass on one rank, and its reductions in flight.

    Args:
        x: the embeddings ``[batch, seq, hidden]``.
        way: the way of this pass; None chooses it by the tokens of ``x``, of which a pass may later cut some off.
    """

    def __init__(self, x: Tensor, sums: Sums, way: Way | None = None) -> None:
        self._landed: Tensor | None = x  # what a read has included; None if the oldest sum in flight holds it, too
        self._sums = sums
        self._way = way or sums.ways.of("decode" if x.shape[1] == 1 else "prefill", x.shape[0] * x.shape[1])
        self._collected: Tensor | None = None
        self._leaving: tuple[LayerSums, Any, Tensor | None] | None = None  # see ``leave``
        self._in_flight: list[Callable[[], Tensor]] = []  # oldest first; each returns its sum when it has arrived

    def add(self, step: Step, layer: int, out: Tensor, arrive: Callable[[Tensor], Tensor]) -> None:
        """Do with this rank's output of a call what the step says.

        Args:
            step: what is called, and what happens to its output.
            layer: 0-based index of the decoder layer.
            out: the output ``[batch, seq, hidden]``, which may be written over.
            arrive: what the layer does with the sum over the ranks before it is added to the stream. Outputs that share
                a sum have the same one, and under Desync it acts on a part of an output as on the whole.
        """
        if step.joins:
            assert self._collected is not None, "the first output of a sum is collected"
            out, self._collected = self._collected + out, None
        if step.then == "collect":
            self._collected = out
            return
        if step.then == "local":
            self._in_flight.append(partial(_given, arrive(out)))
            return
        if step.then == "resync":
            assert self._landed is not None, "a reduction of Desync includes what this rank has added"
            out, self._landed = arrive(out) + self._landed / self._sums.ranks.degree, None
            arrive = _given
        wait = reduce.reduce(out, self._sums.ranks.group, self._way.reduce, layer).wait
        if not self._way.travels:
            wait = partial(_given, wait())
        self._in_flight.append(lambda: arrive(wait()))

    def read(self, places: Sequence[int]) -> Tensor:
        """The stream ``[batch, seq, hidden]`` with the sums at ``places`` among those in flight, which are awaited."""
        for place in places:
            total = self._in_flight[place]()
            self._landed = total if self._landed is None else self._landed + total
        self._in_flight = [wait for n, wait in enumerate(self._in_flight) if n not in places]
        landed = self._landed
        assert landed is not None, "a read under Desync lands what was added before it"
        if self._leaving is not None:
            (own, layer, given), self._leaving = self._leaving, None
            (landed,) = own.blocks.leave(layer, [landed], given)
            self._landed = landed
            # A sum that this read does not include is no input of what the layer adds, but it leaves the layer, too.
            self._in_flight = [partial(_left, own, layer, wait) for wait in self._in_flight]
        return landed

    def leave(self, own: "LayerSums", layer: Any, given: Tensor | None) -> None:
        """Let the stream leave a layer, see ``Blocks.leave``, as soon as the next read has landed what it includes.

        Args:
            own: the layer's place in the schedule.
            given: its features of the tokens ``[batch, seq, width]``, if it has any.
        """
        self._leaving = own, layer, given

    @property
    def shape(self) -> torch.Size:
        """``[batch, seq, hidden]``. transformers' loop over layers may cut tokens off, as it would of a tensor."""
        assert self._landed is not None, "a read under Desync lands what was added before it"
        return self._landed.shape

    def __getitem__(self, place: Any) -> "Stream":
        assert self._landed is not None, "a read under Desync lands what was added before it"
        cut = Stream(self._landed[place], self._sums, self._way)
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


def _left(own: "LayerSums", layer: Any, wait: Callable[[], Tensor]) -> Tensor:
    return own.blocks.leave(layer, [wait()])[0]


def _cut(place: Any, wait: Callable[[], Tensor]) -> Tensor:
    return wait()[place]


@dataclass(frozen=True)
class LayerSums(LayerWiring):
    """A layer's place in the schedule.

    Attributes:
        index: 0-based index of the decoder layer.
        plan: what the layer does.
        sums: how the reductions of the model travel.
    """

    index: int
    plan: LayerPlan
    sums: Sums


class TensorParallelLayer(WiredLayer):
    """A decoder layer whose parts compute partial sums. It passes on a ``Stream``, and the last layer a tensor."""

    fcsd: LayerSums

    def forward(self, hidden_states: Any, given: Tensor | None = None, **kwargs: Any) -> Any:
        if _active_collector.get():
            raise ConfigError("a tensor-parallel model does not return the outputs of single layers")
        own, plan = self.fcsd, self.fcsd.plan
        stream = hidden_states if isinstance(hidden_states, Stream) else Stream(hidden_states, own.sums)
        parts = own.parts(self)
        compiles = own.sums.compiled and own.blocks.beside is None
        if compiles and compiled.possible(kwargs.get(cache_keyword()), own.index):
            self._compiled_step(stream, parts, **kwargs)
        else:
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

    def _compiled_step(self, stream: Stream, parts: Parts, **kwargs: Any) -> None:
        plan, blocks = self.fcsd.plan, self.fcsd.blocks
        attn_norm, mlp_norm = (
            nn.Identity() if name is None else getattr(self, name)
            for name in (blocks.attn_norms[0], blocks.mlp_norms[0])
        )
        x = stream.read(plan.attn)
        self._add(stream, 0, compiled.attend(attn_norm, self.self_attn, x, **kwargs))
        x = stream.read(plan.mlp)
        if parts.routed is None:
            assert isinstance(parts.shared, nn.Module), "the only part of a dense MLP is its module"
            self._add(stream, 1, compiled.dense(mlp_norm, parts.shared, x))
        else:
            self._sparse_step(stream, parts.routed, mlp_norm, x)

    def _sparse_step(self, stream: Stream, routed: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> None:
        """The step of a sparse MLP. A router that does more than transformers' own is left to ``routed``."""
        blocks = self.fcsd.blocks
        mlp: Any = mlp_of(blocks, self)
        router, shared = mlp.get_submodule(blocks.router), shared_of(blocks, self)
        gate = getattr(mlp, blocks.shared_gate) if blocks.shared_gate else None
        if blocks.prescaled or blocks.router_bias or router._forward_hooks:
            router = None
        found = compiled.before_experts(norm, compiled.Sparse(router, shared, gate), x)
        if found.shared is not None:
            self._add(stream, 1, found.shared)
        if router is None:
            out = routed(found.read)
        else:
            out = scaled(blocks, mlp, mlp.experts(found.read.flatten(0, -2), found.chosen, found.weights)).view_as(x)
        self._add(stream, len(self.fcsd.plan.steps) - 1, out)


def wire_tensor_parallel(
    model: PreTrainedModel,
    wiring: Wiring,
    ranks: TensorGroup,
    ways: Ways = Ways(Way("nccl")),  # noqa: B008
    compile_steps: bool = False,
) -> None:
    """Wire a model whose weights are divided (``weights.py``), in place. The call can be repeated on one model.

    Args:
        wiring: any wiring that fits the model, Desync with a degree that is the number of ranks.
        ways: how the ranks reduce in each step. Whether a reduction is awaited where it starts changes no bit of the
            results.
        compile_steps: whether to compile the parts of decoding steps in slots, see ``compiled``; the results are the
            same up to rounding.

    Raises:
        ConfigError: the wiring does not fit the model or the number of ranks, or a format of quantised reductions does
            not fit the width of the model.
    """
    for backend in ways.backends:
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
    try:
        kinds: list[Kind] = [kind_of(parts(layer)) for layer in layers]
        plans = layer_plans(wiring, kinds, range(len(layers)), every=True, blocks=blocks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    sums = Sums(ranks, ways, compile_steps)
    for index, layer in enumerate(layers):
        layer.__class__ = wired_class(TensorParallelLayer, type(layer), blocks.passes is not None)
        layer.fcsd = LayerSums(0, 0, 1, False, parts, blocks, index, plans[index], sums)
