"""Defines the interface of a transport, which sends rows between ranks, the sizes of an exchange, and their count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Splits:
    """The sizes of one all-to-all as one rank sees it, in rows.

    Attributes:
        sends: how many rows go to each rank, in the order of ranks.
        receives: how many rows come from each rank.
        offsets: for each rank, the index of the first row from this rank among all rows that it receives.
        most: the largest number of rows that any rank receives; equal on all ranks.
        between: the largest number of rows that any rank sends to another one; equal on all ranks.
    """

    sends: list[int]
    receives: list[int]
    offsets: list[int]
    most: int
    between: int


def splits_of(matrix: list[list[int]], rank: int) -> Splits:
    """The splits of ``rank``; ``matrix[sender][receiver]`` is how many rows each rank sends to each rank."""
    return Splits(
        sends=matrix[rank],
        receives=[row[rank] for row in matrix],
        offsets=[sum(column[:rank]) for column in zip(*matrix, strict=True)],
        most=max(sum(column) for column in zip(*matrix, strict=True)),
        between=max((n for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j), default=0),
    )


class Work(Protocol):
    """A collective in flight; after ``wait`` its buffers may be read and freed on the current stream."""

    def wait(self) -> Any: ...


class Several:
    """Several works as one, and whether they were awaited. For an event of CUDA, the current stream waits."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works, self.awaited = works, False

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self.awaited = True


class OnStream:
    """Work that was started on a stream. ``wait`` lets the current stream wait for it."""

    def __init__(self, stream: torch.cuda.Stream, tensor: Tensor, start: Callable[[], object]) -> None:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            start()
            self._done = stream.record_event()
        self._kept = tensor  # its memory may belong to another stream

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        del self._kept


# A transport takes (rows to send [sent, width], splits, group, keep). It returns a buffer [received, width] that is
# being filled, and the work that fills it. ``keep`` says whether the caller keeps the buffer. Without ``keep`` the
# caller must have read the buffer before it starts the next exchange without ``keep``. A transport copies rows of any
# dtype and does not interpret them.
Transport = Callable[[Tensor, Splits, Any, bool], tuple[Tensor, Work]]


def all_to_all(rows: Tensor, splits: Splits, group: Any, keep: bool) -> tuple[Tensor, Work]:
    """The transport that uses the all-to-all of torch.distributed, by NCCL or gloo."""
    del keep  # every call makes a new buffer
    received = rows.new_empty(sum(splits.receives), rows.shape[1])
    work = dist.all_to_all_single(received, rows, splits.receives, splits.sends, group=group, async_op=True)
    assert work is not None
    return received, work


@dataclass
class Traffic:
    """What this rank has sent and received since ``reset``. It is computed on the host from the splits of exchanges.

    Attributes:
        sent: bytes that this rank has sent to other ranks.
        fullest: the largest number of rows that this rank has received in one dispatch, its own rows included.
    """

    sent: int = 0
    fullest: int = 0

    def reset(self) -> None:
        """Begin to count at zero."""
        self.sent = self.fullest = 0

    def add(self, rows: Tensor, splits: Splits, group: Any, *, dispatch: bool) -> None:
        """Count one exchange.

        Args:
            rows: what this rank sends, ``[sent, width]``.
            group: the process group of the ranks that exchange rows.
            dispatch: whether the rows are those of dispatch in the forward direction.
        """
        away = len(rows) - splits.sends[dist.get_rank(group)]
        self.sent += away * rows.shape[1] * rows.element_size()
        if dispatch:
            self.fullest = max(self.fullest, sum(splits.receives))
