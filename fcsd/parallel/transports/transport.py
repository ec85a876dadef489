"""How rows travel between the ranks of an expert-parallel group, and how many go where."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """One all-to-all as one rank sees it, in rows.

    Attributes:
        sends: to each rank, in the order of ranks.
        receives: from each rank.
        places: where this rank's rows begin among all those that each rank receives.
        most: the most that any rank receives, equal on all ranks.
    """

    sends: list[int]
    receives: list[int]
    places: list[int]
    most: int


def route(matrix: list[list[int]], rank: int) -> Route:
    """The route of ``rank``, given how many rows each rank sends to each: ``matrix[sender][receiver]``."""
    return Route(
        sends=matrix[rank],
        receives=[row[rank] for row in matrix],
        places=[sum(column[:rank]) for column in zip(*matrix, strict=True)],
        most=max(sum(column) for column in zip(*matrix, strict=True)),
    )


class Work(Protocol):
    """A collective in flight; after ``wait`` its buffers may be read and freed on the current stream."""

    def wait(self) -> Any: ...


# (rows to send, route, group, whether the caller keeps what arrives) -> (buffer being filled, work)
Transport = Callable[[Tensor, Route, Any, bool], tuple[Tensor, Work]]


def all_to_all(rows: Tensor, route: Route, group: Any, keep: bool) -> tuple[Tensor, Work]:
    """torch.distributed's own: NCCL or gloo."""
    del keep  # the caller owns what arrives
    received = rows.new_empty(sum(route.receives), rows.shape[1])
    work = dist.all_to_all_single(received, rows, route.receives, route.sends, group=group, async_op=True)
    assert work is not None
    return received, work
