"""One MoE block in one forward pass, step by step, and the stream that waits for its output."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]

from fcsd.parallel import order
from fcsd.parallel.deferred import Deferred, Exchange, launch
from fcsd.parallel.expert.block import choose, pack, run_experts, weigh
from fcsd.parallel.expert.split_plan import start_plan
from fcsd.parallel.transports.transport import Route, Transport


class MoePass:
    """Gate and pack now, then ``launch``, ``run_experts`` and ``land``, each once and in this order.

    Nothing is kept past the step that uses it: a buffer of rows is alive from its launch to its first use.

    Args:
        moe: the AutoEP layer.
        layer: its 0-based index.
        x: normalised input ``[batch, seq, hidden]``.
        side: CUDA stream for what must not wait for the compute stream.
        fused: as ``choose``'s.
    """

    def __init__(
        self, moe: Any, layer: int, x: Tensor, side: Any, transport: Transport, eager: bool, fused: bool
    ) -> None:
        self._moe, self._layer, self._side, self._shape = moe, layer, side, (x.shape[0], x.shape[1], x.shape[2])
        self._transport, self._eager = transport, eager
        flat = x.reshape(-1, x.shape[-1])
        self._choice = choose(moe, flat, fused)
        self._sizes = start_plan(moe, self._choice, layer, "recompute" if order.in_backward() else "fwd", side)
        self._packed: Tensor | None = pack(moe, flat, self._choice)
        self._packed_event = None if side is None else torch.cuda.current_stream().record_event()
        self._dispatch: Deferred | None = None
        self._combine: Deferred | None = None

    def launch(self, awaited_at: int | None) -> None:
        """Wait for the split sizes and send the packed rows; the second time does nothing."""
        if self._packed is None:
            return
        self._plan = self._sizes()
        exchange = self._exchange("dispatch", self._plan.dispatch, self._plan.combine, kept=False)
        exchange.ready, exchange.side = self._packed_event, self._side
        self._dispatch = self._send(self._packed, exchange, awaited_at)
        self._packed = None

    def run_experts(self, awaited_at: int | None) -> None:
        """Await dispatch, run this rank's experts, send the outputs back."""
        assert self._dispatch is not None
        outputs = run_experts(self._moe, self._dispatch.wait(), self._plan.counts)
        self._dispatch = None
        exchange = self._exchange("combine", self._plan.combine, self._plan.dispatch, kept=True)
        self._combine = self._send(outputs, exchange, awaited_at)

    def land(self) -> Tensor:
        """Await combine and sum per token: the routed experts' output ``[batch, seq, hidden]``."""
        assert self._combine is not None
        rows = self._combine.wait()
        self._combine = None
        return weigh(self._moe, rows, self._choice, self._shape)

    def _exchange(self, name: str, route: Route, back: Route, kept: bool) -> Exchange:
        return Exchange(name, self._layer, self._moe.ep_group, route, back, kept, self._transport, self._eager)

    def _send(self, rows: Tensor, exchange: Exchange, awaited_at: int | None) -> Deferred:
        return Deferred(rows, None) if self._moe.ep_size == 1 else launch(rows, exchange, awaited_at)


class InFlight:
    """A full stream whose last output may still be on the wire.

    Under activation checkpointing it is landed inside the *next* layer, but what landing saves for backward belongs
    to the layer that launched: the hooks in force at its launch are used again. The landed stream is kept, because
    a recompute of the next layer reads it once more.
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
