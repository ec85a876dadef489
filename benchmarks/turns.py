"""Ways to do the same thing, timed in turns, so that a drift of the machine affects all of them alike."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fcsd.bench.runner import together

_WARM_UPS = 2  # repeats that are not counted


class Timing(NamedTuple):
    """The milliseconds of one way: the median over all repeats, and the quartiles."""

    median: float
    low: float
    high: float


def timings(
    ways: Mapping[str, Callable[[], Any]],
    device: torch.device,
    repeats: int,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Timing]:
    """Time every way once in each repeat. All ranks call this with the same names and start each way together.

    The time of a run is that of the slowest rank; a process that has joined no group is alone. On GPUs the time is
    measured between two events, so that it does not contain the host's wait for the GPU; on CPUs by the clock.

    Args:
        before: runs before each way, outside of its time.
    """
    taken = torch.zeros(repeats, len(ways))
    for repeat in range(-_WARM_UPS, repeats):
        for number, run in enumerate(ways.values()):
            before()
            milliseconds = together(run, device)
            if repeat >= 0:
                taken[repeat, number] = milliseconds
    slowest = taken.to(device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = {}
    for name, column in zip(ways, slowest.T.tolist(), strict=True):
        quartiles = statistics.quantiles(column, n=4, method="inclusive") if repeats > 1 else column * 3
        found[name] = Timing(statistics.median(column), quartiles[0], quartiles[2])
    return found
