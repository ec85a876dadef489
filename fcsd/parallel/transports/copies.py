"""All-to-all by copies into the memory of the other ranks of one host: no multiprocessor takes part in it.

Every rank has buffers that the others write into, shared by all layers. For exchange n a rank

    for each peer:  copies its rows into the peer's buffer | sets ARRIVED n there
    for each peer:  awaits ARRIVED n of the peer

each line on a stream of its own. The copies run on copy engines, and the flags are written and awaited by the streams
themselves. Rows are read where they arrived: a copy within the device would be a kernel, which computation waits for.
There are two such buffers, taken in turn. Nobody writes into one that is still read: a rank starts exchange n + 2 when
the rows of n + 1 have arrived, which the others sent once they had read those of n.

Rows that are kept for longer have a third buffer, from which they are copied out as they arrive; FREE n says when.

When any rank would receive more than its buffer holds, all ranks know it from their routes, and all send the rows of
that exchange by ``all_to_all``: nothing is ever dropped. The next exchange finds larger buffers.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from fcsd.parallel.transports.transport import Route, Work, all_to_all

ARRIVED, FREE = 0, 1
_ALIGNMENT = 512  # bytes, of each buffer


class Window(Protocol):
    """The buffers of all ranks of a group as one rank sees them, with a number for each flag and pair of ranks.

    Attributes:
        rank: of this process, of ``size``.
        buffers: of each rank, ``[capacity]`` bytes; the own is the one that others write into.
    """

    rank: int
    size: int
    buffers: list[Tensor]

    def sending(self) -> AbstractContextManager[Any]:
        """Where copies to others are given: after what the current stream was given so far."""
        ...

    def receiving(self) -> AbstractContextManager[Any]:
        """Where copies out of the own buffer are given, likewise."""
        ...

    def tell(self, peer: int, flag: int, number: int) -> None:
        """Set this rank's flag at ``peer`` once all copies given before are complete."""
        ...

    def hear(self, peer: int, flag: int, number: int) -> None:
        """Let copies given from now on wait until ``peer`` has set its flag here to ``number`` or more."""
        ...

    def work(self) -> Work:
        """Done when all copies given so far are."""
        ...


class Puts:
    """The transport, for one process group.

    Args:
        open_window: makes the window of a group with a capacity in bytes, on all ranks together; None where there
            can be none.
        slack: room for how many times the rows of the largest exchange so far.
    """

    def __init__(self, open_window: Callable[[Any, int], Window | None], slack: float = 1.25) -> None:
        self._lent, self._kept = _Lane(open_window, slack, keep=False), _Lane(open_window, slack, keep=True)

    def __call__(self, rows: Tensor, route: Route, group: Any, keep: bool) -> tuple[Tensor, Work]:
        """As ``transport.all_to_all``; rows that are not kept are to be read before the next such exchange starts."""
        return (self._kept if keep else self._lent)(rows, route, group)


class _Lane:
    """Exchanges one after the other whose rows are kept, through one buffer, or are not, through two in turn."""

    def __init__(self, open_window: Callable[[Any, int], Window | None], slack: float, keep: bool) -> None:
        self._open, self._slack, self._keep, self._slots = open_window, slack, keep, 1 if keep else 2
        self._window: Window | None = None
        self._capacity = self._largest = self._exchanges = 0
        self._last: _Awaited | None = None

    def __call__(self, rows: Tensor, route: Route, group: Any) -> tuple[Tensor, Work]:
        assert self._last is None or self._last.awaited, "the rows of the exchange before were never awaited"
        if self._largest > self._capacity:
            self._capacity = math.ceil(self._slack * self._largest / _ALIGNMENT) * _ALIGNMENT
            self._window, self._exchanges, self._last = self._open(group, self._slots * self._capacity), 0, None
        needed = route.most * rows.shape[1] * rows.element_size()
        self._largest = max(self._largest, needed)
        if self._window is None or needed > self._capacity:
            return all_to_all(rows, route, group, self._keep)
        self._exchanges += 1
        received = self._exchange(self._window, rows, route)
        work = _Awaited(self._window.work())
        if not self._keep:
            self._last = work
        return received, work

    def _exchange(self, window: Window, rows: Tensor, route: Route) -> Tensor:
        row = rows.shape[1] * rows.element_size()
        outgoing, incoming = _spans(route.sends, row), _spans(route.receives, row)
        number, me, others = self._exchanges, window.rank, range(1, window.size)
        start = number % self._slots * self._capacity
        arriving = window.buffers[me][start : start + sum(route.receives) * row]
        shape = sum(route.receives), rows.shape[1]
        received = rows.new_empty(shape) if self._keep else arriving.view(rows.dtype).view(shape)
        source, target = rows.view(torch.uint8).view(-1), received.view(torch.uint8).view(-1)
        with window.sending():
            for step in others:  # at every moment each rank sends to another one
                peer = (me + step) % window.size
                if self._keep:
                    window.hear(peer, FREE, number - 1)
                part = source[outgoing[peer]]
                window.buffers[peer].narrow(0, start + route.places[peer] * row, len(part)).copy_(part)
                window.tell(peer, ARRIVED, number)
        with window.receiving():
            target[incoming[me]].copy_(source[outgoing[me]])
            for step in others:
                peer = (me - step) % window.size
                window.hear(peer, ARRIVED, number)
                if self._keep:
                    target[incoming[peer]].copy_(arriving[incoming[peer]])
            if self._keep:
                for step in others:
                    window.tell((me - step) % window.size, FREE, number)
        return received


class _Awaited:
    """Work that knows whether it was awaited."""

    def __init__(self, work: Work) -> None:
        self._work, self.awaited = work, False

    def wait(self) -> None:
        self._work.wait()
        self.awaited = True


def _spans(counts: list[int], row: int) -> list[slice]:
    """The bytes of each rank's rows, one after the other."""
    return [slice(*ends) for ends in pairwise(accumulate((count * row for count in counts), initial=0))]
