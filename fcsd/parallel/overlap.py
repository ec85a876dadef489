"""Runs expert parallelism with dispatch and combine in flight: collectives are awaited where the wiring needs them.

The wiring says which output may be in flight at each read. ``SCHEDULES`` says when a collective starts and which
computation hides it. One farskip layer has this order in the forward pass (FarSkip Figure 9; ``[`` launches, ``]``
awaits):

    q, k, v (k) ]combine k-1 | gate, pack [dispatch k | rotary, core attention | ]dispatch k | experts [combine k | ...

The outputs and gradients equal those of ``blocking_parts`` in every bit: contributions to one tensor are summed in the
same order, or in the same groups where ``_private`` makes groups.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.wiring import DESYNC, LayerWiring, WiredLayer, Wiring, _refuse_reentrant, mixer, wired_class
from fcsd.parallel import order, process_settings
from fcsd.parallel.attention import Around, calls_inside, join_attention, split_attention
from fcsd.parallel.expert.autoep import expert_block
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.blocking import wire_parallel
from fcsd.parallel.expert.dispatcher import Combined, Dispatched, Dispatcher, Mode, Packed, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.quantised import Quantiser
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.host import HostTransport
from fcsd.parallel.transports.transport import Traffic, Transport, all_to_all

Place = Literal["before_attn", "before_rotary", "before_core", "after_core", "after_attn"]
_ORDER: tuple[Place, ...] = get_args(Place)


class Schedule(NamedTuple):
    """When the MoE block of a layer starts, and which computation hides its collectives."""

    start: Place  # where the last combine is awaited and the gate runs; dispatch follows
    shared_covers: Literal["dispatch", "combine"] = "combine"  # the collective under which the shared experts run


# Maps the read depths of (attention, MLP) to a schedule. An MLP that reads its own layer's attention starts after it.
SCHEDULES: dict[tuple[int, int], Schedule] = {
    # Core attention may use all SMs. Rows that are sent after it has begun would travel only when it has ended.
    (1, 1): Schedule("before_rotary"),
    (0, 1): Schedule("before_attn"),  # attention hides dispatch; only the shared experts hide combine
    (1, 0): Schedule("after_attn", "dispatch"),  # the next layer's attention hides combine
    # Combine is exposed; the split sizes arrive while the shared experts run.
    (0, 0): Schedule("after_attn", "dispatch"),
}


@dataclass(frozen=True)
class LayerOverlap(LayerWiring):
    """What a layer reads, and how its collectives overlap with computation.

    Args:
        index: 0-based index of the decoder layer.
        attention: the module that mixes its tokens.
        schedule: when its collectives start, and what hides them.
        launch: the earliest place where the host waits for the split sizes in order to launch dispatch.
        dispatcher: what carries its rows to the experts and back.
        block: its MoE block; None for a dense layer.
        transfer: how its rows travel.
        accumulations: autograd's nodes that accumulate the gradients of its experts.
    """

    index: int
    attention: nn.Module
    schedule: Schedule
    launch: Place
    dispatcher: Dispatcher
    block: ExpertBlock | None
    transfer: Transfer
    accumulations: list[Any]


class InFlight:
    """A full stream whose last output may still be in flight.

    Under activation checkpointing ``land`` is called inside the *next* layer, but the tensors that it saves for the
    backward pass belong to the layer that launched the output. ``land`` therefore uses the saved-tensor hooks that were
    active when this object was made. The full stream is kept, because a recompute of the next layer reads it again.

    Args:
        land: waits for the output and returns the stream ``[batch, seq, hidden]``; called once.
    """

    def __init__(self, land: Callable[[], Tensor]) -> None:
        self._land: Callable[[], Tensor] | None = land
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)
        self._full: Tensor | None = None

    def land(self) -> Tensor:
        """The full stream ``[batch, seq, hidden]``; the first call waits."""
        if self._land is not None:
            hooks = nullcontext() if self._hooks is None else torch.autograd.graph.saved_tensors_hooks(*self._hooks)
            with hooks:
                self._full = self._land()
            self._land = self._hooks = None
        assert self._full is not None
        return self._full


class OverlappedLayer(WiredLayer):
    """A decoder layer that passes on a full stream whose last output may still be in flight."""

    fcsd: LayerOverlap

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        """The streams are those of ``WiredLayer``, but the first one may be an ``InFlight``."""
        _refuse_reentrant(self)
        plan = self.fcsd
        streams = plan.streams(hidden_states)
        # After a dense layer whose output is settled, both streams are the same tensor and nothing is in flight.
        partial_read = plan.attn > 0 and streams[-1] is not streams[0]
        x = plan.grouped("attn", _private(streams[-1]) if partial_read else _landed(streams[0]))
        x = plan.blocks.read(self, "attn", x)
        mlp = _Mlp(self, dispatch_awaited_at=order.mark() if plan.mlp else None)

        def reach(place: Place) -> None:
            if _ORDER.index(place) >= _ORDER.index(plan.launch):
                mlp.advance()
            if plan.schedule.start == place and plan.mlp:
                mlp.start(_private(_landed(streams[0])))

        def before_core() -> None:
            reach("before_core")
            mlp.combine_awaited_at = order.mark() if plan.mlp else None

        reach("before_attn")
        around = Around(partial(reach, "before_rotary"), before_core, partial(reach, "after_core"))
        attn = plan.parts(self).attn
        assert attn is not None, "experts of layers with one sub-block are not divided"
        with calls_inside(plan.attention, around) as arguments:
            a = attn(x, **arguments, **kwargs)
        reach("after_attn")
        full = _landed(streams[0]) + plan.blocks.arrive(self, "attn", a)
        if not plan.mlp:
            mlp.start(full)
        return mlp.finish(full)


class _Mlp:
    """The MLP of one layer in one pass, divided into the steps that a schedule calls."""

    x: Tensor  # normalised input [batch, seq, hidden]; set by ``start``

    def __init__(self, layer: OverlappedLayer, dispatch_awaited_at: int | None) -> None:
        self.layer, self.plan = layer, layer.fcsd
        self.dispatch_awaited_at = dispatch_awaited_at
        self.combine_awaited_at: int | None = None
        self.packed: Packed | None = None
        self.handle: Dispatched | None = None

    def start(self, stream: Tensor) -> None:
        """Normalise ``stream [batch, seq, hidden]``, route and pack tokens; without a side stream start dispatch."""
        self.x = self.plan.blocks.read(self.layer, "mlp", stream)
        plan = self.plan
        if plan.block is not None:
            self.packed = plan.dispatcher(plan.block, plan.index, self.x, plan.transfer)
            if self.dispatch_awaited_at is None:
                self.dispatch_awaited_at = order.mark()
            if plan.transfer.side is None:
                self.advance()

    def advance(self) -> None:
        """Start the exchanges that can start, if this MLP has started."""
        if self.packed is not None:
            packed, self.packed = self.packed, None
            self.handle = packed.dispatch(self.dispatch_awaited_at)
        elif self.handle is not None:
            self.handle = self.handle.forward()

    def finish(self, full: Tensor) -> Any:
        """The streams for the next layer: ``full [batch, seq, hidden]`` plus this MLP's output, as the wiring says."""
        shared, block = self.plan.parts(self.layer).shared, self.plan.block
        settled = combined = None
        if shared is not None and (block is None or self.plan.schedule.shared_covers == "dispatch"):
            settled = shared(self.x)
        if block is not None:
            self.advance()
            # The gradient of dispatch is sent before the experts' gradients are accumulated and ZeRO's hooks run. A
            # recompute runs in another thread with other numbers, so the nodes keep the numbers of the first pass.
            assert self.dispatch_awaited_at is not None and self.handle is not None
            if not order.in_backward():
                for node in self.plan.accumulations:
                    node._set_sequence_nr(self.dispatch_awaited_at + 1)
            combined = self.handle.combine(self.combine_awaited_at)
            if shared is not None and settled is None:
                settled = shared(self.x)
            combined = combined.forward()
        below, arrive = full, partial(self.plan.blocks.arrive, self.layer, "mlp")
        if settled is not None and self.plan.settles(combined is not None):
            below, settled = full + arrive(settled), None
        in_flight = InFlight(partial(_add, below, combined, settled, arrive))
        # A recompute must save all tensors inside this layer. Captured hidden states must be full streams.
        awaited = self.plan.hands_on == 1 or combined is None or order.in_backward() or _captures_hidden_states()
        first = in_flight.land() if awaited else in_flight
        return first if self.plan.hands_on == 1 else (first, below)


def _add(
    below: Tensor, combined: Combined | None, settled: Tensor | None, arrive: Callable[[Tensor], Tensor]
) -> Tensor:
    routed = None if combined is None else combined.land()
    if settled is not None:
        routed = settled if routed is None else routed + settled
    return below if routed is None else below + arrive(routed)


def _landed(stream: Tensor | InFlight) -> Tensor:
    return stream.land() if isinstance(stream, InFlight) else stream


def _private(x: Tensor) -> Tensor:
    """A view of ``x``; the gradients of its readers are summed in a group, which is then added to those of ``x``."""
    return x.view_as(x)


def _captures_hidden_states() -> bool:
    return "hidden_states" in (_active_collector.get() or {})


def overlap(
    model: PreTrainedModel,
    wiring: Wiring,
    mode: Mode = "on",
    fused: bool = False,
    transport: Transport = all_to_all,
    dispatcher: Dispatcher = flat,
    quantiser: Quantiser | None = None,
    traffic: Traffic | None = None,
) -> None:
    """Wire a model whose experts are divided, with its all-to-alls in flight. The call can be undone and repeated.

    Args:
        mode: ``on`` awaits every collective where its rows are first used. ``eager-sync`` awaits every collective where
            it starts; if its results differ from those of ``on``, a wait is missing. ``off`` is ``wire_parallel``.
        fused: see ``wire_parallel``.
        quantiser: rounds the rows to the formats of quantised communication; None sends them as they are.
        traffic: counts the bytes that are sent; None does not count.

    Raises:
        ConfigError: the wiring or the attention implementation does not allow it.
    """
    if wiring.name in DESYNC or wiring.distance > 1:
        what = wiring.name if wiring.name in DESYNC else f"distance {wiring.distance}"
        raise ConfigError(f"overlap does not support {what}", hint="set parallel.ep_size: 1")
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        raise ConfigError("overlap does not support weights that ZeRO-3 has divided", hint="use ZeRO stage 1 or 2")
    join_attention(model)
    wire_parallel(model, wiring, fused, dispatcher, quantiser, traffic)
    if mode == "off":
        return
    split_attention(model)
    device = next(model.parameters()).device
    side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    if side is not None and mode == "on":
        process_settings.warn(os.environ)
    blocks = arch_of(model.config).blocks
    # Copies need no SM, so they need not be launched before core attention: the host launches core attention first, and
    # the device computes while the host launches the copies.
    by_copies = isinstance(transport, CopiesTransport | HostTransport)
    transfer = Transfer(transport, mode, side, fused, quantiser, traffic)
    for index, layer in enumerate(cast(Any, decoder_layers(model))):
        plan = layer.fcsd
        block = expert_block(layer.get_submodule(blocks.mlp))
        layer.fcsd = LayerOverlap(
            **{f.name: getattr(plan, f.name) for f in fields(plan)},
            index=index,
            attention=mixer(blocks, layer),
            schedule=SCHEDULES[plan.attn, plan.mlp],
            launch="after_core" if by_copies else "before_core",
            dispatcher=dispatcher,
            block=block,
            transfer=transfer,
            accumulations=[] if block is None else order.accumulations(block.experts),
        )
        layer.__class__ = wired_class(OverlappedLayer, layer.unwired, blocks.passes is not None)
