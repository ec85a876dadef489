"""Times functions. Several ways to do the same thing run in turns, so that a drift of the machine affects all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fcsd.launch.world import barrier

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

    The time of a run is that of the slowest rank. On GPUs it is measured between two events, so that it does not
    contain the host's wait for the GPU; on CPUs by the clock.

    Args:
        ways: the functions to time, by name.
        device: the device of this rank.
        repeats: how often each way is timed.
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
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = {}
    for name, column in zip(ways, slowest.T.tolist(), strict=True):
        quartiles = statistics.quantiles(column, n=4, method="inclusive") if repeats > 1 else column * 3
        found[name] = Timing(statistics.median(column), quartiles[0], quartiles[2])
    return found


def together(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one run on this rank. All ranks call this and start at the same time."""
    finished(device)
    barrier()
    if device.type == "cuda":
        return on_gpu(run)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def on_gpu(run: Callable[[], Any]) -> float:
    """Milliseconds of one run on the current stream, measured between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def finished(device: torch.device) -> float:
    """The seconds of the host's clock when all work that was started on this process's device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
