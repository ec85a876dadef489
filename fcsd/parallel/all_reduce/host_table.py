"""Which way of summing through the host is fastest for how many bytes: measured where it will be used, in seconds.

What a server does without fcsd is measured beside it and wins where it is faster, so a server with this table is never
slower than without it, on the sizes that were measured.
"""

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.bit_split import Format
from fcsd.kernels.host.layout import BLOCKS, ONE_SHOT
from fcsd.parallel.all_reduce.host import HostSums

STOCK = "stock"
SIZES = tuple(2**power for power in (13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26))
_GRAPHED = 8 << 20  # up to so many bytes a sum is timed in a CUDA graph, as a step of decoding is
_MOST = {"one_shot": ONE_SHOT, "in_blocks": BLOCKS}  # bytes
_REPEATS = 5


class HostTable(NamedTuple):
    """The fastest way by bytes.

    Attributes:
        microseconds: by bytes, of every way that was measured.
        ways: the fastest of each size, in the order of ``sizes``.
        sizes: in bytes, ascending. A tensor takes the way of the next larger size, or of the last one.
    """

    microseconds: Mapping[int, Mapping[str, float]]
    sizes: tuple[int, ...]
    ways: tuple[str, ...]

    def way(self, size: int) -> str:
        """The way for a tensor of so many bytes."""
        return self.ways[min(bisect_left(self.sizes, size), len(self.sizes) - 1)]


def measured(
    sums: HostSums,
    stock: Callable[[Tensor], Tensor],
    group: Any,
    format: Format | None = None,
    sizes: tuple[int, ...] = SIZES,
) -> HostTable:
    """Time all ways; all ranks call it together, and none has anything else on its GPU.

    Args:
        stock: what sums without fcsd, out of place.
        format: is weighed, too, if it is given: it changes results.
    """
    found: dict[int, dict[str, float]] = {}
    for size in sizes:
        x = torch.randn(size // 512, 256, device="cuda").to(torch.bfloat16)
        runs: dict[str, Callable[[Tensor], Any]] = {STOCK: stock}
        for method in ("one_shot", "in_blocks", "exchange"):
            if size <= _MOST.get(method, size):
                runs[method] = lambda x, method=method: sums.all_reduce(x, torch.empty_like(x), method)
        if format is not None and size >= 1 << 18:
            runs[f"exchange:{format}"] = lambda x: sums.all_reduce(x, torch.empty_like(x), format=format)
        found[size] = {name: _microseconds(run, x, group) for name, run in runs.items()}
    return of_times(found)


def of_times(found: Mapping[int, Mapping[str, float]]) -> HostTable:
    """The table that follows from times."""
    sizes = tuple(sorted(found))
    return HostTable(found, sizes, tuple(min(found[size], key=found[size].__getitem__) for size in sizes))


def _microseconds(run: Callable[[Tensor], Any], x: Tensor, group: Any) -> float:
    """The median time of a sum on the slowest rank, the same on all ranks."""
    graphed = x.nbytes <= _GRAPHED
    count = 40 if x.nbytes <= 1 << 18 else 10 if graphed else 5
    for _ in range(2):
        run(x)
    torch.cuda.synchronize()
    many: Callable[[], Any] = lambda: [run(x) for _ in range(count)]  # noqa: E731
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        many = graph.replay
    times = []
    for _ in range(_REPEATS + 1):
        dist.barrier(group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        many()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, statistics.median(times[1:]), group=group)
    return max(everywhere)
