"""An all-to-all in flight: launched now, awaited at first use; the same in the backward pass, the other way round.

Two autograd nodes make one exchange. ``_Launch`` starts it in forward and awaits its gradient's in backward;
``_Await`` awaits it in forward and starts its gradient's in backward. The one edge between them carries a gradient
buffer that is still being written; no other node can read it or add to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from . import order


class Work(Protocol):
    """A collective in flight; after ``wait`` its buffers may be read and freed on the current stream."""

    def wait(self) -> Any: ...


# (rows to send, rows for each rank, rows from each rank, group) -> (buffer being filled, work)
Transport = Callable[[Tensor, list[int], list[int], Any], tuple[Tensor, Work]]


def all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> tuple[Tensor, Work]:
    """torch.distributed's own: NCCL or gloo."""
    received = rows.new_empty(sum(receives), rows.shape[1])
    work = dist.all_to_all_single(received, rows, receives, sends, group=group, async_op=True)
    assert work is not None
    return received, work


@dataclass
class Exchange:
    """One all-to-all of one layer, and its gradient's.

    Args:
        name: ``dispatch`` or ``combine``.
        layer: 0-based index of the decoder layer.
        sends: rows for each rank.
        receives: rows from each rank.
        eager: await every collective where it starts.
        ready: CUDA event after which the rows to send are complete; with it the forward launch does not wait for
            what the compute stream was given since. ``side`` is the stream it is launched from.
    """

    name: str
    layer: int
    group: Any
    sends: list[int]
    receives: list[int]
    transport: Transport = all_to_all
    eager: bool = False
    ready: torch.Event | None = None
    side: torch.cuda.Stream | None = None
    in_flight: tuple[Work, Tensor, Tensor] | None = field(default=None, init=False)

    def launch(self, rows: Tensor, sends: list[int], receives: list[int], passes: str) -> Tensor:
        """Start sending ``rows [sum(sends), hidden]``; the buffer ``[sum(receives), hidden]`` fills until ``land``."""
        rows = rows.contiguous()
        with record_function(f"fcsd::{self.name}.{passes}.L{self.layer}"), self._stream() as early:
            received, work = self.transport(rows, sends, receives, self.group)
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
        exchange.launch(rows, exchange.sends, exchange.receives, "recompute" if order.in_backward() else "fwd")
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
        exchange = ctx.exchange
        return exchange.launch(grad, exchange.receives, exchange.sends, "bwd"), None
