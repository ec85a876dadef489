"""All-to-all by copies into the memory of the other ranks of one host: no multiprocessor takes part in it.

Every rank has one buffer that the others write into, shared by all layers. For exchange n a rank

    for each peer:  awaits FREE n-1 of the peer | copies its rows into the peer's buffer | sets ARRIVED n there
    for each peer:  awaits ARRIVED n of the peer | copies its rows out of the own buffer
    sets FREE n at every peer

each line on a stream of its own, so that rows leave the buffer while others still arrive. The copies run on copy
engines, and the flags are written and awaited by the streams themselves.

When any rank would receive more than its buffer holds, all ranks know it from their routes, and all send the rows of
that exchange by ``all_to_all``: nothing is ever dropped. The next exchange finds larger buffers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from .transport import Route, Work, all_to_all

ARRIVED, FREE = 0, 1


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

    def __init__(self, open_window: Callable[[Any, int], Window | None], slack: float = 1.5) -> None:
        self._open, self._slack = open_window, slack
        self._window: Window | None = None
        self._capacity = self._largest = self._exchanges = 0

    def __call__(self, rows: Tensor, route: Route, group: Any) -> tuple[Tensor, Work]:
        """As ``transport.all_to_all``."""
        if self._largest > self._capacity:
            self._capacity = int(self._slack * self._largest)
            self._window, self._exchanges = self._open(group, self._capacity), 0
        needed = route.most * rows.shape[1] * rows.element_size()
        self._largest = max(self._largest, needed)
        if self._window is None or needed > self._capacity:
            return all_to_all(rows, route, group)
        received = rows.new_empty(sum(route.receives), rows.shape[1])
        self._exchanges += 1
        _exchange(self._window, self._exchanges, rows, received, route)
        return received, self._window.work()


def _exchange(window: Window, number: int, rows: Tensor, received: Tensor, route: Route) -> None:
    row = rows.shape[1] * rows.element_size()
    source, target = rows.view(torch.uint8).view(-1), received.view(torch.uint8).view(-1)
    outgoing, incoming = _spans(route.sends, row), _spans(route.receives, row)
    me, others = window.rank, range(1, window.size)
    with window.sending():
        for step in others:  # at every moment each rank sends to another one
            peer = (me + step) % window.size
            window.hear(peer, FREE, number - 1)
            part = source[outgoing[peer]]
            window.buffers[peer].narrow(0, route.places[peer] * row, len(part)).copy_(part)
            window.tell(peer, ARRIVED, number)
    with window.receiving():
        target[incoming[me]].copy_(source[outgoing[me]])
        for step in others:
            peer = (me - step) % window.size
            window.hear(peer, ARRIVED, number)
            target[incoming[peer]].copy_(window.buffers[me][incoming[peer]])
        for step in others:
            window.tell((me - step) % window.size, FREE, number)


def _spans(counts: list[int], row: int) -> list[slice]:
    """The bytes of each rank's rows, one after the other."""
    return [slice(*ends) for ends in pairwise(accumulate((count * row for count in counts), initial=0))]
