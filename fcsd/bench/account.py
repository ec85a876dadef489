"""Where the time of a step goes: every millisecond of the device's timeline under the name of a phase.

A phase is a range ``fcsd.phase::NAME`` that a thread of the host records. A device event belongs to the phase of the
thread that launched it. Autograd's threads record none: what they launch belongs to the phase in which the thread that
waits for them is at that time.
At each moment of the timeline exactly one of three things holds, and the moment is counted there:

- ``computing``: a kernel, fill or copy within the device runs. It counts for the phase of the event that began first.
- ``exposed``: only communication runs. It counts for the phase of the communication that began first.
- ``idle``: nothing runs. It counts for the phase of the event that runs next, because the device waits for its launch.
"""

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import record_function

from fcsd.errors import BadInputError
from fcsd.parallel.trace import LAUNCHES, ON_DEVICE, RANGE

PREFIX = "fcsd.phase::"
BETWEEN = "between"  # launched in no phase
STATES = ("computing", "exposed", "idle")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Records the block as a phase of the step; phases may nest, and the innermost one counts."""
    with record_function(PREFIX + name):
        yield


class Event(NamedTuple):
    """Something that ran on the device, in µs, and the phase in which it was launched."""

    start: float
    end: float
    phase: str
    communication: bool


@dataclass(frozen=True)
class Account:
    """The timeline of one rank, in ms.

    Attributes:
        total: from the start of the first device event to the end of the last.
        phases: by phase, in order of appearance, the ms of each of ``STATES``; they add up to ``total``.
        synchronisations: by phase, how often the host waited for the device, and for how many ms.
    """

    total: float
    phases: dict[str, dict[str, float]]
    synchronisations: dict[str, tuple[int, float]]


def read_account(path: Path) -> Account:
    """The account of a gzipped or plain Chrome trace.

    Raises:
        BadInputError: it is not such a trace, or nothing in it ran on a device.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} is not a Chrome trace of torch.profiler") from error
    own = _Ranges(events, lambda name: name[len(PREFIX) :] if name.startswith(PREFIX) else None, by_thread=True)
    any_thread = _Ranges(events, lambda name: name[len(PREFIX) :] if name.startswith(PREFIX) else None)

    def phase_of(launch: dict[str, Any]) -> str:
        """Of the thread that launches; autograd's threads have none and work for the thread that waits for them."""
        return own.at(launch) or any_thread.at(launch) or BETWEEN

    collectives = _Ranges(events, lambda name: name if RANGE.fullmatch(name) else None, by_thread=True)
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in LAUNCHES and "correlation" in e["args"]}
    found = []
    for event in events:
        if event.get("cat") in ON_DEVICE:
            launch = launches.get(event["args"].get("correlation"))
            name = BETWEEN if launch is None else phase_of(launch)
            sent = event["name"].startswith("nccl") or (launch is not None and collectives.at(launch) is not None)
            found.append(Event(event["ts"], event["ts"] + event["dur"], name, sent))
    if not found:
        raise BadInputError(f"{path}: nothing ran on a device", hint="profile on a GPU")
    waits: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in LAUNCHES and "Synchronize" in event["name"]:
            name = phase_of(event)
            count, ms = waits.get(name, (0, 0.0))
            waits[name] = count + 1, ms + event["dur"] / 1e3
    return _partition(sorted(found), waits)


class _Ranges:
    """Ranges of the host by time, nested or not: the innermost one around a moment."""

    def __init__(self, events: list[dict[str, Any]], name_of: Any, by_thread: bool = False) -> None:
        self._by_thread = by_thread
        self._found: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and (name := name_of(event["name"])) is not None:
                self._found[self._key(event)].append((event["ts"], event["ts"] + event["dur"], name))
        for ranges in self._found.values():
            ranges.sort()

    def _key(self, event: dict[str, Any]) -> Any:
        return (event["pid"], event["tid"]) if self._by_thread else None

    def at(self, event: dict[str, Any]) -> str | None:
        ranges = self._found.get(self._key(event), [])
        place = bisect_right(ranges, (event["ts"], float("inf"), "")) - 1
        while place >= 0:  # ranges that began before, the latest first: the first that has not ended is the innermost
            if event["ts"] <= ranges[place][1]:
                return ranges[place][2]
            place -= 1
        return None


def _partition(events: list[Event], waits: dict[str, tuple[int, float]]) -> Account:
    """Counts each moment between the borders of events once."""
    phases: dict[str, dict[str, float]] = {}

    def count(name: str, state: str, microseconds: float) -> None:
        phases.setdefault(name, dict.fromkeys(STATES, 0.0))[state] += microseconds / 1e3

    borders = sorted({moment for event in events for moment in (event.start, event.end)})
    running: list[Event] = []
    upcoming = 0
    for start, end in pairwise(borders):
        while upcoming < len(events) and events[upcoming].start <= start:
            running.append(events[upcoming])
            upcoming += 1
        running = [event for event in running if event.end > start]
        computing = [event for event in running if not event.communication]
        if computing:
            count(computing[0].phase, "computing", end - start)
        elif running:
            count(running[0].phase, "exposed", end - start)
        else:
            count(events[upcoming].phase, "idle", end - start)
    return Account((borders[-1] - borders[0]) / 1e3, phases, waits)


def to_text(account: Account) -> str:
    """A line for each phase, and their sum."""
    lines = [
        f"{'phase':20s} " + " ".join(f"{state + ' ms':>13s}" for state in STATES) + f" {'all ms':>9s} {'share':>7s}"
    ]
    rows = {**account.phases, "sum": {s: sum(row[s] for row in account.phases.values()) for s in STATES}}
    for name, row in rows.items():
        whole = sum(row.values())
        columns = " ".join(f"{row[state]:13.2f}" for state in STATES)
        lines.append(f"{name:20s} {columns} {whole:9.2f} {whole / account.total:7.1%}")
    told = ", ".join(f"{name} {count} ({ms:.1f} ms)" for name, (count, ms) in account.synchronisations.items())
    return "\n".join([*lines, f"the host waited for the device: {told or 'never'}"])
