"""Measures how much communication is hidden in a profiler trace.

fcsd records each collective in a range that is named ``fcsd::{kind}.{pass}.L{layer}``.

A collective consists of all device events that were launched inside one such range: an NCCL kernel, or the copies into
the memory of peers and out of this rank's buffer. It lasts from the start of its first event to the end of its last
event. Computation is every other kernel, fill and copy within the device, except NCCL's kernels. fcsd changes the
sequence numbers of autograd, so the links that the profiler makes from the backward to the forward pass are meaningless
and are not used.
"""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcsd.errors import BadInputError
from fcsd.input_lines import blocks

RANGE = re.compile(r"fcsd::(?P<kind>\w+)\.(?P<passes>\w+)\.L(?P<layer>\d+)")
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
_LEAVES = re.compile(r"Memcpy (?!DtoD)")  # copies from or to the host, or to another device


class Call(NamedTuple):
    """One collective on one rank, from the start of its first device event to the end of its last one, in µs."""

    kind: str  # dispatch, combine, plan, reduce
    passes: str  # fwd, bwd, recompute
    layer: int
    start: float
    end: float
    copies: tuple[tuple[float, float], ...] = ()  # start and end of each copy; empty for an NCCL kernel

    def waits(self, until: float) -> float:
        """For how many µs before ``until``, the time when the last rank starts, this rank copies nothing."""
        before = max(self.start, min(until, self.end))
        return before - self.start - covered(self.start, before, union(list(self.copies)))


class Kernel(NamedTuple):
    """One kernel of computation, or one fill or copy within the device; times are in µs."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """The collectives and the computation in one rank's trace."""

    rank: int
    calls: list[Call]
    computation: list[Kernel]
    busy: np.ndarray  # [n, 2], disjoint intervals in which something is computed


@dataclass(frozen=True)
class Overlap:
    """The calls of one kind in one pass on all given ranks; times are sums in ms."""

    calls: int
    on_device: float  # from the start of a call to its end, including the time in which it waits for late ranks
    hidden: float  # the part of it during which something is computed
    late: float | None  # the part of it before the last rank starts, while this one copies nothing; None with one trace

    @property
    def share(self) -> float:
        """The share of the time on the device during which something is computed, 0..1 (FarSkip Table 3)."""
        return self.hidden / self.on_device if self.on_device else 0.0

    @property
    def exposed(self) -> float:
        return self.on_device - self.hidden


def read_content(path: Path) -> dict[str, Any]:
    """The content of a Chrome trace that ``torch.profiler`` exported, plain or gzipped, with complete events alone.

    Raises:
        BadInputError: the file is not such a trace.
    """
    try:
        content = json.loads(b"".join(blocks(path)))
        return {**content, "traceEvents": [event for event in content["traceEvents"] if event.get("ph") == "X"]}
    except (BadInputError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(f"{path} is not a Chrome trace of torch.profiler") from error


def read(path: Path) -> Trace:
    """Read a Chrome trace that ``torch.profiler`` exported, plain or gzipped.

    Raises:
        BadInputError: the file is not such a trace, or no range of fcsd in it has device events.
    """
    content = read_content(path)
    events = content["traceEvents"]
    ranges = _ranges(events)
    owner = {
        event["args"]["correlation"]: found
        for event in events
        if event.get("cat") in LAUNCHES and (found := _enclosing(ranges, event)) is not None
    }
    parts: dict[tuple[int, str], list[tuple[float, float, bool]]] = defaultdict(list)
    computation: list[Kernel] = []
    for event in events:
        if event.get("cat") not in ON_DEVICE:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        if (found := owner.get(event["args"].get("correlation"))) is not None:
            parts[found].append((start, end, event["cat"] == "gpu_memcpy"))
        elif not event["name"].startswith("nccl") and not _LEAVES.match(event["name"]):
            computation.append(Kernel(event["name"], start, end))
    if not parts:
        raise BadInputError(
            f"{path}: no collective of fcsd ran on a device in it",
            hint="profile the CPU and CUDA activities of a model that fcsd.parallel.overlap has wired",
        )
    calls = []
    for (_, name), mine in parts.items():
        match = RANGE.fullmatch(name)
        assert match is not None
        starts, ends, _ = zip(*mine, strict=True)
        copies = tuple((start, end) for start, end, is_copy in mine if is_copy)
        calls.append(Call(match["kind"], match["passes"], int(match["layer"]), min(starts), max(ends), copies))
    calls.sort(key=lambda call: call.start)
    rank = content.get("distributedInfo", {}).get("rank", 0)
    computation.sort(key=lambda kernel: kernel.start)
    busy = union([(kernel.start, kernel.end) for kernel in computation])
    return Trace(rank, calls, computation, busy)


def _ranges(events: list[dict[str, Any]]) -> dict[tuple[Any, Any], list[tuple[float, float, int, str]]]:
    """The ranges of fcsd by process and thread, ordered by time: start, end, number, name. Ranges are never nested."""
    ranges = defaultdict(list)
    for number, event in enumerate(events):
        if event.get("cat") == "user_annotation" and RANGE.fullmatch(event["name"]):
            ranges[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], number, event["name"]))
    return {thread: sorted(found) for thread, found in ranges.items()}


def _enclosing(ranges: dict[Any, list[tuple[float, float, int, str]]], event: dict[str, Any]) -> tuple[int, str] | None:
    """The number and name of the range that contains a launch; None if no range contains it."""
    found = ranges.get((event["pid"], event["tid"]), [])
    place = bisect_right(found, (event["ts"], float("inf"))) - 1
    if place < 0 or event["ts"] > found[place][1]:
        return None
    return found[place][2:]


def union(intervals: list[tuple[float, float]]) -> np.ndarray:
    """The disjoint intervals, ordered, that cover the same points: ``[n, 2]``."""
    ordered = np.array(sorted(intervals), dtype=np.float64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.r_[True, ordered[1:, 0] > reach[:-1]]
    return np.stack([ordered[first, 0], reach[np.r_[first[1:], True]]], axis=1)


def covered(start: float, end: float, by: np.ndarray) -> float:
    """The length of the part of an interval that lies in the disjoint intervals ``by [n, 2]``."""
    return float(np.clip(np.minimum(by[:, 1], end) - np.maximum(by[:, 0], start), 0, None).sum())


def overlaps(traces: list[Trace]) -> dict[tuple[str, str], Overlap]:
    """How much of each (kind, pass) is hidden. The kind ``all`` is the sum of dispatch and combine.

    Args:
        traces: one trace of each rank, or of some ranks. With several traces, the time on the device before the last
            rank starts counts as waiting.
    """
    starts = _last_starts(traces)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for trace in traces:
        for key, call in _numbered(trace.calls):
            values = 1, call.end - call.start, covered(call.start, call.end, trace.busy), call.waits(starts[key])
            kinds = [call.kind, "all"] if call.kind in ("dispatch", "combine") else [call.kind]
            for kind in kinds:
                sums[kind, call.passes] = [a + b for a, b in zip(sums[kind, call.passes], values, strict=True)]
    return {
        key: Overlap(int(calls), on_device / 1e3, hidden / 1e3, late / 1e3 if len(traces) > 1 else None)
        for key, (calls, on_device, hidden, late) in sorted(sums.items())
    }


def _numbered(calls: list[Call]) -> list[tuple[tuple[str, str, int, int], Call]]:
    """Each call with a key that is the same on every rank: kind, pass, layer, and the number of such calls before."""
    seen: dict[tuple[str, str, int], int] = defaultdict(int)
    numbered = []
    for call in calls:
        key = call[:3]
        numbered.append(((*key, seen[key]), call))
        seen[key] += 1
    return numbered


def _last_starts(traces: list[Trace]) -> dict[tuple[str, str, int, int], float]:
    starts: dict[tuple[str, str, int, int], float] = {}
    for trace in traces:
        for key, call in _numbered(trace.calls):
            starts[key] = max(starts.get(key, call.start), call.start)
    return starts
