"""The sequence-parallel form of tensor-parallel training: each rank has its own rows of the residual stream.

A rank's rows are an equal part of the tokens of a forward pass, and it computes norms and additions for them alone
(Korthikanti et al. 2022, §4.2.2). A sub-block computes from all rows, so its input is gathered before it, and its
partial outputs are summed and scattered behind it. Both move as many bytes together as the all-reduce that they
replace. In the backward pass the two change places.

As in ``sums``, each transfer has one node of autograd that starts it and one that awaits it. The edge between them
carries a tensor that no other node reads.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fcsd.parallel import order
from fcsd.parallel.tensor.sums import KeptGradient, TrainingSums
from fcsd.parallel.transports.transport import Work


class Transfer:
    """A gather of all rows from the ranks that own them, or a sum of all rows that is scattered to these ranks."""

    def __init__(self, sums: TrainingSums, layer: int, gathers: bool) -> None:
        self._sums, self._layer, self._gathers = sums, layer, gathers
        self._work: Work | None = None
        self._found: Tensor | None = None
        self._sent: Tensor | None = None

    def start(self, x: Tensor, passes: str) -> Tensor:
        """Start with ``x`` of ``[rows, hidden]``, and return the tensor that is being filled."""
        ranks, x = self._sums.ranks, x.contiguous()
        if self._sums.backend == "none":  # the bound sends nothing and is wrong
            self._found = x.repeat(ranks.degree, 1) if self._gathers else x[: len(x) // ranks.degree].clone()
            return self._found
        rows = len(x) * ranks.degree if self._gathers else len(x) // ranks.degree
        self._found, self._sent = x.new_empty(rows, x.shape[1]), x
        send = dist.all_gather_into_tensor if self._gathers else dist.reduce_scatter_tensor
        with record_function(f"fcsd::{'gather' if self._gathers else 'scatter'}.{passes}.L{self._layer}"):
            # A work may write when it is awaited (gloo's scatter does), which autograd must not see.
            self._work = send(self._found.detach(), x, group=ranks.group, async_op=True)  # pyright: ignore[reportAttributeAccessIssue]
        return self._found

    def wait(self) -> None:
        """Wait; later calls return at once."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None

    def take(self) -> Tensor:
        """Wait, and return the tensor of ``start`` without keeping it. It is called once."""
        self.wait()
        found, self._found = self._found, None
        assert found is not None, "a transfer is taken once, after it was started"
        return found


@dataclass(frozen=True)
class Gathered:
    """All rows of a sub-block's input, which may still be in flight.

    Attributes:
        rows: what is being filled, ``[rows, hidden]``.
        transfer: what fills it.
        gradient: the sum of its gradient over the ranks, of which this rank gets its own rows.
    """

    rows: Tensor
    transfer: Transfer
    gradient: Transfer

    def land(self, sums: TrainingSums, shape: torch.Size) -> Tensor:
        """The input ``[batch, seq, hidden]``, as the column-parallel products of a sub-block read it."""
        self.transfer.wait()
        return _ScatterGradient.apply(self.rows, self.gradient, sums.mode in ("off", "eager-sync")).view(shape)


def gather_input(own: Tensor, sums: TrainingSums, layer: int) -> Gathered:
    """Start to gather a sub-block's input from this rank's rows ``[1, rows, hidden]`` and those of the others."""
    transfer, gradient = Transfer(sums, layer, True), Transfer(sums, layer, False)
    rows = _GatherInput.apply(own[0], transfer, gradient)
    if sums.waits:
        transfer.wait()
    return Gathered(rows, transfer, gradient)


def scatter_output(out: Tensor, sums: TrainingSums, layer: int) -> Any:
    """Start to sum the partial output of a sub-block ``[batch, seq, hidden]``.

    Returns: a function that waits, and returns this rank's rows of the sum, ``[1, rows, hidden]``.
    """
    transfer, gradient = Transfer(sums, layer, False), Transfer(sums, layer, True)
    out = _AwaitGradient.apply(out.flatten(0, -2), gradient, sums.waits)
    own = _ScatterOutput.apply(out, transfer, gradient, sums.waits)
    if sums.waits:
        transfer.wait()

    def land() -> Tensor:
        transfer.wait()
        if own.requires_grad:
            # The gradients of its readers come from here, and its own gather starts at once.
            order.run_at(own, order.mark())
        return own[None]

    return land


def own_rows(x: Tensor, sums: TrainingSums) -> Tensor:
    """This rank's rows ``[1, rows, hidden]`` of a tensor ``[batch, seq, hidden]`` that every rank has.

    The gradients of all rows are gathered, so that every rank has the gradient of the whole tensor.
    """
    return _OwnRows.apply(x.flatten(0, -2), sums)[None]


def all_rows(own: Tensor, sums: TrainingSums, shape: torch.Size) -> Tensor:
    """The whole tensor, for readers that compute the same on every rank; the gradient of each row is theirs alone."""
    return _AllRows.apply(own[0], sums).view(shape)


def part_of(x: Tensor, sums: TrainingSums) -> Tensor:
    """This rank's rows of ``x``, as they are."""
    return x.tensor_split(sums.ranks.degree)[sums.ranks.rank]


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, transfer: Transfer, gradient: Transfer) -> Tensor:
        ctx.gradient = gradient
        return transfer.start(own, "recompute" if order.in_backward() else "fwd")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # ``grad`` has the gradients that this rank computed for all rows; their sum is in flight.
        return ctx.gradient.take(), None, None


class _ScatterGradient(KeptGradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradient.start(grad, "bwd")
        if ctx.waits:
            ctx.gradient.wait()
        return grad, None, None


class _AwaitGradient(KeptGradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.take(), None, None


class _ScatterOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, transfer: Transfer, gradient: Transfer, waits: bool) -> Tensor:
        ctx.gradient, ctx.waits = gradient, waits
        return transfer.start(out, "recompute" if order.in_backward() else "fwd")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        found = ctx.gradient.start(grad, "bwd")
        if ctx.waits:
            ctx.gradient.wait()
        return found, None, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: TrainingSums) -> Tensor:
        ctx.sums = sums
        return part_of(x, sums).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        transfer = Transfer(ctx.sums, 0, True)
        transfer.start(grad, "bwd")
        return transfer.take(), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sums: TrainingSums) -> Tensor:
        ctx.sums = sums
        transfer = Transfer(sums, 0, True)
        transfer.start(own, "fwd")
        return transfer.take()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return part_of(grad, ctx.sums).clone(), None
