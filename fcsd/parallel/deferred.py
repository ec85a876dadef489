"""An all-to-all in flight: it is launched now and awaited at its first use, in the forward and in the backward pass.

One exchange consists of two autograd nodes. In the forward pass ``_Launch`` starts the exchange, and in the backward
pass it awaits the exchange of the gradient. ``_Await`` awaits the exchange in the forward pass, and starts that of the
gradient in the backward pass. There the one edge between the two nodes carries a gradient that is still being received;
no other node can read it or add to it.

``exchange_now`` is the reference. It sends and waits in one node, without a transport.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fcsd.parallel import order
from fcsd.parallel.transports.transport import Splits, Traffic, Transport, Work, all_to_all


class Codec(Protocol):
    """Encodes rows as records of bytes and decodes them, on the current stream.

    ``Exchange`` sends the records through any transport, which copies them unchanged. The codecs of a ``FusedPermute``
    move rows as well: they make several records of a row, or decode another number of rows than there are records.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """``[rows, width]`` of a floating dtype -> a new ``uint8 [rows, bytes of a record]``."""
        ...

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """``uint8 [rows, bytes of a record]`` -> a new ``[rows, width]`` of ``dtype``."""
        ...


@dataclass
class Exchange:
    """One all-to-all of one layer, and the all-to-all of its gradient.

    Args:
        name: ``dispatch`` or ``combine``.
        layer: 0-based index of the decoder layer.
        group: the process group of the ranks that exchange rows.
        there: the splits of the rows.
        back: the splits of their gradients.
        kept: whether the rows that arrive are saved for the backward pass.
        transport: how the rows travel.
        eager: whether every collective is awaited where it starts.
        codec: packs the rows into records; None sends the rows as they are.
        back_codec: packs the gradients in the same way.
        traffic: counts the bytes that are sent; None does not count.
        ready: the CUDA event after which the rows to send are complete. With it, the forward launch does not wait for
            kernels that were added to the compute stream after the event.
        side: the CUDA stream from which a launch with ``ready`` starts.
    """

    name: str
    layer: int
    group: Any
    there: Splits
    back: Splits
    kept: bool
    transport: Transport = all_to_all
    eager: bool = False
    codec: Codec | None = None
    back_codec: Codec | None = None
    traffic: Traffic | None = None
    ready: torch.Event | None = None
    side: torch.cuda.Stream | None = None
    in_flight: tuple[Work, Tensor, Tensor] | None = field(default=None, init=False)  # work, received, sent
    _unpack: tuple[Codec, int, torch.dtype] | None = field(default=None, init=False)  # codec, width, dtype of the rows

    def launch(self, rows: Tensor, passes: str) -> Tensor:
        """Start to send ``rows [sent, hidden]``.

        Args:
            passes: ``fwd``, ``recompute``, or ``bwd`` for gradients.

        Returns: a tensor ``[received, hidden]`` that stands for the rows in flight. It must not be read: ``land``
            returns the rows.
        """
        rows = rows.contiguous()
        splits, codec = (self.back, self.back_codec) if passes == "bwd" else (self.there, self.codec)
        # During a recompute, exchanges alternate with those of other layers' backward passes, so the rows are kept.
        keep = (self.kept and passes == "fwd") or passes == "recompute"
        with record_function(f"fcsd::{self.name}.{passes}.L{self.layer}"), self._launch_stream() as side:
            sent = rows if codec is None else codec.encode(rows)
            received, work = self.transport(sent, splits, self.group, keep)
        self.count(sent, passes)
        if side is not None:
            received.record_stream(torch.cuda.current_stream())
            if codec is not None:
                sent.record_stream(torch.cuda.current_stream())  # made on the side stream, freed after this one waits
                rows.record_stream(side)
        if self.eager:
            work.wait()
        self.in_flight = (work, received, sent)
        if codec is None:
            return received
        self._unpack = (codec, rows.shape[1], rows.dtype)
        return _stand_in(rows, len(received))

    def land(self) -> Tensor:
        """Wait for the received rows ``[received, hidden]``. Afterwards the exchange refers to no buffer."""
        assert self.in_flight is not None, f"{self.name} of layer {self.layer} has not been launched"
        work, received, _ = self.in_flight
        self.in_flight = None
        work.wait()
        if self._unpack is None:
            return received
        (codec, width, dtype), self._unpack = self._unpack, None
        return codec.decode(received, width, dtype)

    def count(self, sent: Tensor, passes: str) -> None:
        """Count the records or rows ``[sent, width]`` of one pass."""
        if self.traffic is not None:
            splits, forward = (self.back, False) if passes == "bwd" else (self.there, True)
            self.traffic.add(sent, splits, self.group, dispatch=forward and self.name == "dispatch")

    @contextmanager
    def _launch_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Make the side stream current if there is a ``ready`` event; otherwise yield None and change no stream."""
        ready, self.ready = self.ready, None  # the exchange of the gradient is launched from the compute stream
        if ready is None or self.side is None:
            yield None
            return
        self.side.wait_event(ready)
        with torch.cuda.stream(self.side):
            yield self.side


class Deferred:
    """Rows that may still be in flight; ``wait`` returns them, ``[received, hidden]``, and is called once.

    Args:
        rows: the rows, or a tensor that stands for the rows in flight.
        exchange: the exchange that is in flight; None if ``rows`` are the rows.
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
    """Start to send ``rows [sent, hidden]``.

    Args:
        gradient_awaited_at: the place in the backward pass at which the gradient of the rows is awaited, from
            ``order.mark``.
    """
    token = _Launch.apply(rows, exchange)
    order.run_at(token, gradient_awaited_at)
    return Deferred(token, exchange)


def exchange_now(rows: Tensor, exchange: Exchange) -> Tensor:
    """Send ``rows [sent, hidden]`` and wait for ``[received, hidden]``; the gradient is exchanged in the same way.

    Of ``exchange`` only the splits, the group, the codecs and the counter of bytes are used.
    """
    return _Now.apply(rows, exchange)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.launch(rows, "recompute" if order.in_backward() else "fwd")
        return _stand_in(rows, len(rows))  # the output has the shape of the rows' gradient

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del grad  # stands for the gradient in flight
        return ctx.exchange.land(), None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.count = exchange, len(token)
        return exchange.land()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = ctx.exchange.launch(grad, "bwd")
        # A codec that moves rows decodes another number of rows than it receives.
        return received if len(received) == ctx.count else _stand_in(received, ctx.count), None


class _Now(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _exchange_now(rows, exchange, "fwd")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange_now(grad, ctx.exchange, "bwd"), None


def _exchange_now(rows: Tensor, exchange: Exchange, passes: str) -> Tensor:
    forward = passes != "bwd"
    splits, codec = (exchange.there, exchange.codec) if forward else (exchange.back, exchange.back_codec)
    sent = rows.contiguous() if codec is None else codec.encode(rows.contiguous())
    received = sent.new_empty(sum(splits.receives), sent.shape[1])
    dist.all_to_all_single(received, sent, splits.receives, splits.sends, group=exchange.group)
    exchange.count(sent, passes)
    return received if codec is None else codec.decode(received, rows.shape[1], rows.dtype)


def _stand_in(rows: Tensor, count: int) -> Tensor:
    """A tensor ``[count, hidden]`` with the dtype of ``rows``, which takes the memory of one number only."""
    return rows.new_empty(()).expand(count, rows.shape[1])
