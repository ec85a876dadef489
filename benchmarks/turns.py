"""Ways to do the same thing, timed in turns, so that a drift of the machine affects all of them alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
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


def ratio(part: float | None, whole: float | None, form: str = ".1%") -> str | None:
    """``part / whole`` as text, for a cell of a table; None if either was not measured."""
    return format(part / whole, form) if part is not None and whole else None


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2


def reset_peak(device: torch.device) -> None:
    """Begins to observe the peak memory of a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    """The GiB that torch had allocated at most since ``reset_peak``; None on CPUs."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
