"""Expert parallelism with dispatch and combine in flight: the wiring of ``models/``, every collective awaited late.

What may be in flight is the wiring's to say; when it starts and what covers it is a ``Schedule``'s. One farskip
layer in forward, FarSkip Figure 9 (``[`` launch, ``]`` await):

    q, k, v (k) ]combine k-1 | gate, pack [dispatch k | rotary, core attention | ]dispatch k | experts [combine k | ...

The function computed is ``blocking_parts``', to the last bit of every gradient: contributions to one tensor are
summed in the same order, or in the same groups, where ``_private`` makes them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal, cast, get_args

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.wiring import DESYNC, LayerWiring, WiredLayer, Wiring, _refuse_reentrant
from fcsd.parallel import order, process_settings
from fcsd.parallel.attention import Around, after_projections, join_attention, split_attention
from fcsd.parallel.expert.block import wire_parallel
from fcsd.parallel.expert.moe_pass import InFlight, MoePass
from fcsd.parallel.transports.copies import Puts
from fcsd.parallel.transports.transport import Transport, all_to_all

Place = Literal["before_attn", "before_rotary", "before_core", "after_core", "after_attn"]
_ORDER: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Schedule:
    """When the MoE of a layer starts, and what covers its collectives.

    Args:
        start: where in the layer the last combine is awaited and the gate runs; dispatch follows.
        launch: where the host waits for the split sizes at the earliest, to launch dispatch.
        shared_covers: which collective the shared experts run under.
        transport: how rows travel.
        eager: await every collective where it starts: the same code, nothing hidden.
    """

    start: Place
    shared_covers: Literal["dispatch", "combine"] = "combine"
    transport: Transport = all_to_all
    eager: bool = False
    launch: Place = "before_core"


# (attention's, MLP's read depth) -> schedule. An MLP that reads its own layer's attention cannot start before it.
DEFAULTS: dict[tuple[int, int], Schedule] = {
    # Core attention may fill the device: rows that are sent later than it begins travel when it ends.
    (1, 1): Schedule("before_rotary"),
    (0, 1): Schedule("before_attn"),  # nothing covers combine but the shared experts; attention covers dispatch
    (1, 0): Schedule("after_attn", "dispatch"),  # the next attention covers combine
    (0, 0): Schedule("after_attn", "dispatch"),  # combine stays exposed; the split sizes arrive under shared experts
}


@dataclass(frozen=True)
class LayerOverlap(LayerWiring):
    """How a layer reads, and how it overlaps: ``moe`` is None for a dense layer, ``side`` None without CUDA.

    ``fused`` is as ``choose``'s in ``expert.py``; ``accumulations`` are autograd's nodes for the gradients of its
    experts.
    """

    index: int
    schedule: Schedule
    moe: AutoEPMoELayer | None
    side: torch.cuda.Stream | None
    fused: bool
    accumulations: list[Any]


class OverlappedLayer(WiredLayer):
    """A decoder layer of which the full stream it hands on may still be in flight."""

    fcsd: LayerOverlap

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        """Streams as in ``WiredLayer``; the first may be an ``InFlight``."""
        _refuse_reentrant(self)
        plan = self.fcsd
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        # After a settled dense layer both streams are one tensor, with nothing in flight.
        partial_read = plan.attn > 0 and streams[-1] is not streams[0]
        x = self.input_layernorm(_private(streams[-1]) if partial_read else _landed(streams[0]))
        mlp = _Mlp(self, dispatch_awaited_at=order.mark() if plan.mlp else None)

        def reach(place: Place) -> None:
            if _ORDER.index(place) >= _ORDER.index(plan.schedule.launch):
                mlp.launch()
            if plan.schedule.start == place and plan.mlp:
                mlp.start(_private(_landed(streams[0])))

        def before_core() -> None:
            reach("before_core")
            mlp.combine_awaited_at = order.mark() if plan.mlp else None

        reach("before_attn")
        with after_projections(self.self_attn, partial(reach, "before_rotary")):
            a = plan.parts(self).attn(x, around=Around(before_core, partial(reach, "after_core")), **kwargs)
        reach("after_attn")
        full = _landed(streams[0]) + a
        if not plan.mlp:
            mlp.start(full)
        return mlp.finish(full)


class _Mlp:
    """The MLP of one layer in one pass, in the steps that a schedule calls."""

    x: Tensor  # normalised input, from ``start`` on

    def __init__(self, layer: OverlappedLayer, dispatch_awaited_at: int | None) -> None:
        self.layer, self.plan = layer, layer.fcsd
        self.dispatch_awaited_at = dispatch_awaited_at
        self.combine_awaited_at: int | None = None
        self.moe: MoePass | None = None

    def start(self, stream: Tensor) -> None:
        """Normalise, choose experts, pack; launch dispatch if the split sizes are known."""
        self.x = self.layer.post_attention_layernorm(stream)
        if self.plan.moe is not None:
            schedule = self.plan.schedule
            self.moe = MoePass(
                self.plan.moe,
                self.plan.index,
                self.x,
                self.plan.side,
                schedule.transport,
                schedule.eager,
                self.plan.fused,
            )
            if self.dispatch_awaited_at is None:
                self.dispatch_awaited_at = order.mark()
            if self.plan.side is None:
                self.launch()

    def launch(self) -> None:
        """Launch dispatch, if it has started and is not under way."""
        if self.moe is not None:
            self.moe.launch(self.dispatch_awaited_at)

    def finish(self, full: Tensor) -> Any:
        """What is handed on: ``full [batch, seq, hidden]`` with this MLP's output added as the wiring says."""
        shared, moe = self.plan.parts(self.layer).shared, self.moe
        settled = None
        if shared is not None and (moe is None or self.plan.schedule.shared_covers == "dispatch"):
            settled = shared(self.x)
        if moe is not None:
            self.launch()
            # The experts' gradients are accumulated, and ZeRO's hooks run, once dispatch's gradient is on the wire.
            # A recompute's numbers are those of another thread; the nodes are the first pass's, and keep theirs.
            assert self.dispatch_awaited_at is not None
            if not order.in_backward():
                for node in self.plan.accumulations:
                    node._set_sequence_nr(self.dispatch_awaited_at + 1)
            moe.run_experts(self.combine_awaited_at)
            if shared is not None and settled is None:
                settled = shared(self.x)
        below = full
        if self.plan.settles_shared and settled is not None:
            below, settled = full + settled, None
        in_flight = InFlight(partial(_add, below, moe, settled))
        # A recompute ends where this layer's saved tensors do; captured hidden states are full streams.
        awaited = self.plan.hands_on == 1 or moe is None or order.in_backward() or _captures_hidden_states()
        first = in_flight.land() if awaited else in_flight
        return first if self.plan.hands_on == 1 else (first, below)


def _add(below: Tensor, moe: MoePass | None, settled: Tensor | None) -> Tensor:
    routed = None if moe is None else moe.land()
    if settled is not None:
        routed = settled if routed is None else routed + settled
    return below if routed is None else below + routed


def _landed(stream: Tensor | InFlight) -> Tensor:
    return stream.land() if isinstance(stream, InFlight) else stream


def _private(x: Tensor) -> Tensor:
    """A view whose own gradient is complete before it is added to ``x``'s, whatever order its readers run in."""
    return x.view_as(x)


def _captures_hidden_states() -> bool:
    return "hidden_states" in (_active_collector.get() or {})


@cache
def _overlapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (OverlappedLayer, cls), {"__module__": cls.__module__, "unwired": cls})


def overlap(
    model: PreTrainedModel,
    wiring: Wiring,
    mode: Literal["on", "eager-sync", "off"] = "on",
    choose: Callable[[LayerWiring, Schedule], Schedule] = lambda _, schedule: schedule,
    fused: bool = False,
    transport: Transport = all_to_all,
) -> None:
    """Wire a model whose experts AutoEP has sharded, with its all-to-alls in flight; reversible and repeatable.

    Args:
        mode: ``eager-sync`` awaits every collective where it starts, to tell a wrong wait from a wrong sum; ``off``
            is ``wire_parallel``.
        choose: gives a layer another schedule than its default.
        fused: as ``wire_parallel``'s.
        transport: how rows travel, unless ``choose`` says otherwise.

    Raises:
        ConfigError: the wiring, a schedule or the attention implementation does not allow it.
    """
    if wiring.name in DESYNC or wiring.distance > 1:
        what = wiring.name if wiring.name in DESYNC else f"distance {wiring.distance}"
        raise ConfigError(f"overlap does not serve {what}", hint="set parallel.overlap: off")
    if mode != "off" and any(map(is_zero_param, model.parameters())):
        raise ConfigError(
            "overlap does not serve ZeRO-3: nodes of different layers take turns in its backward pass, and ZeRO-3 "
            "releases a layer's parameters before the last of them has run",
            hint="set parallel.zero_stage to 1 or 2, or parallel.overlap: off",
        )
    join_attention(model)
    wire_parallel(model, wiring, fused)
    if mode == "off":
        return
    split_attention(model)
    device = next(model.parameters()).device
    side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    if side is not None and mode == "on":
        process_settings.warn(os.environ)
    mlp = arch_of(model.config).blocks.mlp
    for index, layer in enumerate(cast(Any, decoder_layers(model))):
        plan = layer.fcsd
        # Copies need no multiprocessor: core attention goes first, and the device computes while the host gives them.
        launch: Place = "after_core" if isinstance(transport, Puts) else "before_core"
        schedule = choose(plan, replace(DEFAULTS[plan.attn, plan.mlp], transport=transport, launch=launch))
        if plan.mlp == 0 and schedule.start != "after_attn":
            raise ConfigError(f"layer {index}: its MLP reads its own attention and cannot start {schedule.start}")
        block = layer.get_submodule(mlp)
        layer.fcsd = LayerOverlap(
            **{f.name: getattr(plan, f.name) for f in fields(plan)},
            index=index,
            schedule=replace(schedule, eager=schedule.eager or mode == "eager-sync"),
            moe=block if isinstance(block, AutoEPMoELayer) else None,
            side=side,
            fused=fused,
            accumulations=order.accumulations(block.experts) if isinstance(block, AutoEPMoELayer) else [],
        )
        layer.__class__ = _overlapped_class(layer.unwired)
