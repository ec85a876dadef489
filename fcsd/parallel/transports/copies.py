"""An all-to-all by copies into the memory of the other ranks of one host. It uses no SMs.

Every rank has buffers that the other ranks write into, shared by all layers. For exchange n a rank does this:

    for each peer:  copy its rows into the peer's buffer, then set flag ARRIVED to n at the peer
    for each peer:  wait until the peer has set flag ARRIVED to n here

Each of the two loops runs on a stream of its own. Copy engines do the copies. The streams themselves write the flags
and wait for them. The received rows are read directly in the buffer, because a copy within the device would need a
kernel, which delays the computation. Two such buffers are used in turn. A rank never writes into a buffer that is still
being read: it starts exchange n + 2 after the rows of exchange n + 1 have arrived, and the other ranks sent these after
they had read the rows of exchange n.

Rows that the caller keeps for longer use a third buffer. They are copied out of it when they arrive, and then the flag
FREE is set to n.

If any rank would receive more rows than its buffer holds, all ranks know this from their splits, and all of them send
the rows of this exchange by ``all_to_all``. No row is ever dropped. The next exchange makes larger buffers.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from fcsd.parallel.transports.transport import Several, Splits, Work, all_to_all

ARRIVED, FREE = 0, 1
_IN_TURN = 2  # the number of buffers whose rows are read in place
BUFFERS = _IN_TURN + 1  # the buffers of one transport; the last is for rows that the caller keeps
SLACK = 1.25  # the size of a new buffer, divided by the size of the largest exchange so far
_ALIGNMENT = 512  # bytes; the size of each buffer is a multiple


class PeerBuffers(Protocol):
    """The buffers of all ranks of a group as one rank sees them, with one flag of each kind for each pair of ranks.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks.
        buffers: the buffer of each rank, ``uint8 [capacity]``; the other ranks write into ``buffers[rank]``.
    """

    rank: int
    size: int
    buffers: list[Tensor]

    def sending(self) -> AbstractContextManager[Any]:
        """Make the stream of copies to other ranks current; it first waits for all work on the current stream."""
        ...

    def receiving(self) -> AbstractContextManager[Any]:
        """Make the stream of copies out of this rank's buffer current; it waits in the same way."""
        ...

    def set_flag(self, peer: int, flag: int, number: int) -> None:
        """Set this rank's flag at ``peer`` to ``number`` when all copies on the current stream so far are complete."""
        ...

    def await_flag(self, peer: int, flag: int, number: int) -> None:
        """Let the current stream wait until ``peer`` has set its flag here to ``number`` or to a larger number."""
        ...

    def work(self) -> Work:
        """Work that is done when all copies that were started so far are complete."""
        ...


# Makes buffers from (group, capacity in bytes); all ranks call it together. The result is None if the ranks cannot
# access each other's memory.
OpenBuffers = Callable[[Any, int], PeerBuffers | None]


class CopiesTransport:
    """The ``Transport`` of one process group.

    Args:
        slack: the size of a new buffer, divided by the size of the largest exchange so far.
    """

    def __init__(self, open_buffers: OpenBuffers, slack: float = SLACK) -> None:
        self._in_place = _Lane(open_buffers, slack, keep=False)
        self._kept = _Lane(open_buffers, slack, keep=True)

    def __call__(self, rows: Tensor, splits: Splits, group: Any, keep: bool) -> tuple[Tensor, Work]:
        """See ``transport.Transport``."""
        return (self._kept if keep else self._in_place)(rows, splits, group)


class _Lane:
    """A sequence of exchanges. They use one buffer if the caller keeps the rows, and otherwise two buffers in turn."""

    def __init__(self, open_buffers: OpenBuffers, slack: float, keep: bool) -> None:
        self._open, self._slack, self._keep, self._slots = open_buffers, slack, keep, 1 if keep else _IN_TURN
        self._peers: PeerBuffers | None = None
        self._capacity = self._largest = self._exchanges = 0  # bytes, bytes, number of exchanges through the buffers
        self._last: Several | None = None

    def __call__(self, rows: Tensor, splits: Splits, group: Any) -> tuple[Tensor, Work]:
        assert self._last is None or self._last.awaited, "the exchange before this one was never awaited"
        if self._largest > self._capacity:
            self._capacity = math.ceil(self._slack * self._largest / _ALIGNMENT) * _ALIGNMENT
            self._peers, self._exchanges, self._last = self._open(group, self._slots * self._capacity), 0, None
        needed = splits.most * rows.shape[1] * rows.element_size()
        self._largest = max(self._largest, needed)
        if self._peers is None or needed > self._capacity:
            return all_to_all(rows, splits, group, self._keep)
        self._exchanges += 1
        received = self._exchange(self._peers, rows, splits)
        work = Several([self._peers.work()])
        if not self._keep:
            self._last = work
        return received, work

    def _exchange(self, peers: PeerBuffers, rows: Tensor, splits: Splits) -> Tensor:
        row = rows.shape[1] * rows.element_size()
        outgoing, incoming = _spans(splits.sends, row), _spans(splits.receives, row)
        number, me, others = self._exchanges, peers.rank, range(1, peers.size)
        start = number % self._slots * self._capacity
        arriving = peers.buffers[me][start : start + sum(splits.receives) * row]
        shape = sum(splits.receives), rows.shape[1]
        received = rows.new_empty(shape) if self._keep else arriving.view(rows.dtype).view(shape)
        source, target = rows.view(torch.uint8).view(-1), received.view(torch.uint8).view(-1)
        with peers.sending():
            for step in others:  # in each step every rank sends to a different peer
                peer = (me + step) % peers.size
                if self._keep:
                    peers.await_flag(peer, FREE, number - 1)
                part = source[outgoing[peer]]
                peers.buffers[peer].narrow(0, start + splits.offsets[peer] * row, len(part)).copy_(part)
                peers.set_flag(peer, ARRIVED, number)
        with peers.receiving():
            target[incoming[me]].copy_(source[outgoing[me]])
            for step in others:
                peer = (me - step) % peers.size
                peers.await_flag(peer, ARRIVED, number)
                if self._keep:
                    target[incoming[peer]].copy_(arriving[incoming[peer]])
            if self._keep:
                for step in others:
                    peers.set_flag((me - step) % peers.size, FREE, number)
        return received


def _spans(counts: list[int], row: int) -> list[slice]:
    """The bytes of the rows of each rank, if those of all ranks are in order and a row takes ``row`` bytes."""
    return [slice(*ends) for ends in pairwise(accumulate((count * row for count in counts), initial=0))]
