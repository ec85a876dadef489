"""An all-to-all in flight: launched now, awaited at first use; the same in the backward pass, the other way round.

Two autograd nodes make one exchange. ``_Launch`` starts it in forward and awaits its gradient's in backward;
``_Await`` awaits it in forward and starts its gradient's in backward. The one edge between them carries a gradient
buffer that is still being written; no other node can read it or add to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from fcsd.parallel import order
from fcsd.parallel.transports.transport import Route, Transport, Work, all_to_all


@dataclass
class Exchange:
    """One all-to-all of one layer, and its gradient's.

    Args:
        name: ``dispatch`` or ``combine``.
        layer: 0-based index of the decoder layer.
        route: of the rows.
        back: of their gradients.
        kept: whether what arrives is saved for the backward pass.
        eager: await every collective where it starts.
        ready: CUDA event after which the rows to send are complete; with it the forward launch does not wait for
            what the compute stream was given since. ``side`` is the stream it is launched from.
    """

    name: str
    layer: int
    group: Any
    route: Route
    back: Route
    kept: bool
    transport: Transport = all_to_all
    eager: bool = False
    ready: torch.Event | None = None
    side: torch.cuda.Stream | None = None
    in_flight: tuple[Work, Tensor, Tensor] | None = field(default=None, init=False)

    def launch(self, rows: Tensor, route: Route, passes: str) -> Tensor:
        """Start sending ``rows [sent, hidden]``; the buffer ``[received, hidden]`` fills until ``land``."""
        rows = rows.contiguous()
        # Layers that are recomputed take turns with the backward pass of others.
        keep = (self.kept and passes == "fwd") or passes == "recompute"
        with record_function(f"fcsd::{self.name}.{passes}.L{self.layer}"), self._stream() as early:
            received, work = self.transport(rows, route, self.group, keep)
        if early:
            received.record_stream(torch.cuda.current_stream())
        if self.eager:
            work.wait()
        self.in_flight = (work, received, rows)
        return received

    def land(self) -> Tensor:
        """The received rows, complete; both buffers are let go."""
        assert self.in_flight is not None, f"{self.name} of layer {self.layer} is not under way"
        work, received, _ = self.in_flight
        self.in_flight = None
        work.wait()
        return received

    @contextmanager
    def _stream(self) -> Iterator[bool]:
        ready, self.ready = self.ready, None  # the gradient is launched from the compute stream
        if ready is None or self.side is None:
            yield False
            return
        self.side.wait_event(ready)
        with torch.cuda.stream(self.side):
            yield True


class Deferred:
    """Rows that may still be on the wire; ``wait`` gives them ``[received, hidden]``, once.

    With no exchange they were here already.
    """

    def __init__(self, rows: Tensor, exchange: Exchange | None) -> None:
        self._rows: Tensor | None = rows
        self._exchange = exchange

    def wait(self) -> Tensor:
        rows, self._rows = self._rows, None
        assert rows is not None, "a deferred tensor is awaited once"
        if self._exchange is None:
            return rows
        return _Await.apply(rows, self._exchange)


def launch(rows: Tensor, exchange: Exchange, gradient_awaited_at: int | None) -> Deferred:
    """Send ``rows [sent, hidden]`` on their way; their gradient is awaited at this place in the backward pass."""
    token = _Launch.apply(rows, exchange)
    order.run_at(token, gradient_awaited_at)
    return Deferred(token, exchange)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.launch(rows, exchange.route, "recompute" if order.in_backward() else "fwd")
        # Stands for the rows on the wire: the shape of their gradient, and no memory.
        return rows.new_empty(()).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del grad  # the buffer that lands
        return ctx.exchange.land(), None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.land()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.launch(grad, ctx.exchange.back, "bwd"), None
