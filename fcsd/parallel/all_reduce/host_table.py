"""Which way through the host is fastest for how many bytes: measured where it will be used, in seconds.

There is a table for sums in CUDA graphs, and one for sums that the host starts one by one; one for gathering what each
rank has, as a server does its logits outside of graphs; and one for sums of which each rank keeps its rows, as experts
need them beside data-parallel attention. What a server does without fcsd is measured beside it and wins where it is
faster, so a server with these tables is never slower than without them, on the sizes that were measured. Outside of
graphs a step waits as often for the host as for the GPU, so there the time in which the host starts a sum counts as
well, unless it is large.
"""

import fcntl
import json
import math
import os
import re
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.disk import read_input_text, write_json
from fcsd.errors import ConfigError, DiskError
from fcsd.kernels.bit_split import Format
from fcsd.kernels.host.layout import BLOCKS, ONE_SHOT
from fcsd.parallel.all_reduce.host import HostSums

STOCK = "stock"
SIZES = tuple(2**power for power in (13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26))
_BUSY = 1000.0  # microseconds: the smallest sum takes so long only if another process has one of the GPUs meanwhile
_GRAPHED = 8 << 20  # a tensor of up to so many bytes is timed in a CUDA graph, and the host's part in starting it, too
_HIDDEN = 4096  # values of a row whose record is sent
_MOST = {"one_shot": ONE_SHOT, "in_blocks": BLOCKS}  # bytes
_REPEATS = 5
_SETTINGS = ("NCCL_P2P_DISABLE", "NCCL_SHM_USE_CUDA_MEMCPY")  # of NCCL, which change what stock takes
_BETWEEN = 8  # parts of the way from one size to the next
_VERSION = 7  # of what names and times mean


class HostTable(NamedTuple):
    """The fastest way by bytes.

    Attributes:
        microseconds: by bytes, of every way that was measured.
        ways: the fastest of each size, in the order of ``sizes``.
        sizes: in bytes, ascending: those that were measured, and some between them. A tensor takes the way of the next
            larger size, or of the last one.
    """

    microseconds: Mapping[int, Mapping[str, float]]
    sizes: tuple[int, ...]
    ways: tuple[str, ...]

    def way(self, size: int) -> str:
        """The way for a tensor of so many bytes."""
        return self.ways[min(bisect_left(self.sizes, size), len(self.sizes) - 1)]

    def __str__(self) -> str:
        """The sizes up to which each way goes."""
        last = [n for n, way in enumerate(self.ways) if self.ways[n + 1 : n + 2] != (way,)]
        return ", ".join(f"to {self.sizes[n] >> 10} KiB {self.ways[n]}" for n in last)


class HostTables(NamedTuple):
    """The tables of a machine: ``gathers`` goes by the bytes of one rank, ``scatters`` by those before the sum.

    ``sums`` is for sums in CUDA graphs, ``eager`` for those outside of them. ``eager`` and ``gathers`` have the time of
    the GPU and that of the host to start them.
    """

    sums: HostTable
    eager: HostTable
    gathers: HostTable
    scatters: HostTable


class Stock(NamedTuple):
    """What is done without fcsd, out of place, to ``[rows, ...]``; ``scatter`` keeps this rank's rows of the sum."""

    sum: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]


def measured(
    sums: HostSums, stock: Stock, group: Any, format: Format | None = None, sizes: tuple[int, ...] = SIZES
) -> HostTables:
    """Time all ways; all ranks call it together, and none has anything else on its GPU.

    Args:
        format: is weighed, too, if it is given: it changes results.

    Raises:
        ConfigError: on all ranks, if another process works on one of the GPUs.
    """
    found: tuple[dict[int, dict[str, float]], ...] = ({}, {}, {}, {})
    in_graphs, eager, gathered, scattered = found
    for size in sizes:
        x = torch.randn(size // 512, 256, device="cuda").to(torch.bfloat16)
        whole = x[: len(x) - len(x) % sums.size]
        methods = [way for way in ("one_shot", "in_blocks", "exchange") if size <= _MOST.get(way, size)]
        runs: dict[str, Callable[[Tensor], Any]] = {STOCK: stock.sum}
        runs |= {way: lambda x, way=way: sums.all_reduce(x, torch.empty_like(x), way) for way in methods}
        if format is not None and size >= 1 << 16:
            wide = x.view(-1, _HIDDEN)  # a record of a row of a model; many short ones take longer
            for way in ("in_blocks",) * sums.codes(wide, format) + ("exchange",) * (size >= 1 << 18):
                runs[f"{way}:{format}"] = lambda _, x=wide, way=way: sums.all_reduce(
                    x, torch.empty_like(x), way, format
                )
        gathers: dict[str, Callable[[Tensor], Any]] = {STOCK: stock.gather}
        gathers |= {way: lambda x, way=way: sums.gathered(x, way) for way in methods}
        scatters: dict[str, Callable[[Tensor], Any]] = {STOCK: stock.scatter}
        even = [len(whole) // sums.size] * sums.size
        scatters |= {way: lambda x, way=way, even=even: sums.scattered(x, even, way) for way in methods}

        def timed(ways: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, float]:
            return {name: _microseconds(run, x, group) for name, run in ways.items()}

        in_graphs[size], gathered[size], scattered[size] = timed(runs, x), timed(gathers, x), timed(scatters, whole)
        eager[size] = dict(in_graphs[size])
        for times, ways in ((eager[size], runs), (gathered[size], gathers)) if size <= _GRAPHED else ():
            for name, run in ways.items():
                times[name] += _host_microseconds(run, x, group)
        if size == sizes[0] and any(min(table[size].values()) > _BUSY for table in found):
            raise ConfigError(
                "another process works on the GPUs, so the ways to sum cannot be timed",
                "Start one server while nothing else runs; what it measures is kept for the others.",
            )
    return HostTables(*map(of_times, found))


def kept(file: Path, measure: Callable[[], HostTables], group: Any) -> HostTables:
    """The tables in ``file``, or else those that are measured now and kept there; all ranks call it together.

    Servers that start at the same time on the same GPUs would measure each other, so they follow each other.

    Raises:
        ConfigError: see ``measured``.
    """
    first = dist.get_rank(group) == 0
    told: list[Any] = [None]
    with _alone(file) if first else nullcontext():
        if first:
            told[0] = read_times(file)
        dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
        if told[0] is not None:
            return HostTables(*map(of_times, told[0]))
        tables = measure()
        if first:
            with suppress(OSError, DiskError):  # else it is measured again the next time
                write_json(file, {name: _written(table) for name, table in tables._asdict().items()})
    return tables


def file_for(folder: Path, gpu: str, ranks: int, what: str) -> Path:
    """Where a table is kept: by the GPU, the number of ranks, what was asked for, and NCCL's settings."""
    settings = [f"{name}{os.environ[name]}" for name in _SETTINGS if name in os.environ]
    words = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join((gpu, str(ranks), what, *settings)))
    return folder / f"host-sums-{_VERSION}-{words}.json"


def _written(table: HostTable) -> dict[str, dict[str, float]]:
    return {str(size): dict(row) for size, row in table.microseconds.items()}


def read_times(file: Path) -> list[dict[int, dict[str, float]]] | None:
    """The times of each table in a file; None if it is not there or not such a file."""
    try:
        content = json.loads(read_input_text(file))
        found = [
            {int(size): {str(way): float(time) for way, time in row.items()} for size, row in content[name].items()}
            for name in HostTables._fields
        ]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    rows = [row for table in found for row in table.values()]
    times = [time for row in rows for time in row.values()]
    sound = all(math.isfinite(time) and time > 0 for time in times) and all(STOCK in row for row in rows)
    return found if sound and all(found) else None


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold the lock of a file; without one where its folder cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = open(file.parent / "host-sums.lock", "w")  # noqa: SIM115
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def of_times(found: Mapping[int, Mapping[str, float]]) -> HostTable:
    """The table that follows from times. Between two sizes they lie on a line, for the ways that both sizes have."""
    rows = sorted(found.items())
    ways = {rows[0][0]: _fastest(rows[0][1])}
    for (smaller, low), (larger, high) in pairwise(rows):
        for part in range(1, _BETWEEN):
            between = {way: low[way] + (high[way] - low[way]) * part / _BETWEEN for way in low if way in high}
            ways[smaller + (larger - smaller) * part // _BETWEEN] = _fastest(between)
        ways[larger] = _fastest(high)
    return HostTable(found, tuple(ways), tuple(ways.values()))


def exact(tables: HostTables) -> HostTables:
    """The tables without the ways that change results."""
    found = ({size: exact_ways(row) for size, row in table.microseconds.items()} for table in tables)
    return HostTables(*map(of_times, found))


def exact_ways(times: Mapping[str, float]) -> dict[str, float]:
    """The times without those of ways that change results."""
    return {way: time for way, time in times.items() if ":" not in way}


def _fastest(times: Mapping[str, float]) -> str:
    return min(times, key=times.__getitem__)


def _microseconds(run: Callable[[Tensor], Any], x: Tensor, group: Any) -> float:
    """The median time of the GPU on the slowest rank, the same on all ranks: in a CUDA graph, unless ``x`` is large."""
    count = _count(x)
    for _ in range(2):
        run(x)
    torch.cuda.synchronize()
    many: Callable[[], Any] = lambda: [run(x) for _ in range(count)]  # noqa: E731
    if x.nbytes <= _GRAPHED:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        many = graph.replay
    times = []
    for _ in range(_REPEATS + 1):
        dist.barrier(group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run(x)  # so that the GPUs begin together, which their hosts do not
        begin.record()
        many()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return _slowest(times, group)


def _host_microseconds(run: Callable[[Tensor], Any], x: Tensor, group: Any) -> float:
    """The median time in which the host of the slowest rank starts it, outside of graphs; the same on all ranks."""
    count, times = _count(x), []
    for _ in range(_REPEATS + 1):
        dist.barrier(group)
        begun = time.perf_counter()
        for _ in range(count):
            run(x)
        times.append(1e6 * (time.perf_counter() - begun) / count)
        torch.cuda.synchronize()
    return _slowest(times, group)


def _count(x: Tensor) -> int:
    return 40 if x.nbytes <= 1 << 18 else 10 if x.nbytes <= _GRAPHED else 5


def _slowest(times: list[float], group: Any) -> float:
    """The median of all but the first, of the rank where it is largest."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, statistics.median(times[1:]), group=group)
    return max(everywhere)
