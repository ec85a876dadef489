"""Divides the time of a traced step among the phases of the step and among computation, communication and idle time.

A phase is a range ``fcsd.phase::NAME`` that the host's main thread records (``fcsd.distill.step.engine``). A device
event belongs to the phase in which it was launched, whichever thread launched it: the main thread stays inside a phase
while autograd's thread launches kernels for it. At each moment, the timeline of the device is in exactly one of three
states, and the moment is counted for it:

- ``computing``: A kernel, fill or copy within the device runs. The moment counts for the phase of the event that began
  first.
- ``exposed``: Only communication runs. The moment counts for the phase of the communication that began first.
- ``idle``: Nothing runs. The moment counts for the phase of the event that runs next, because the device waits for the
  launch of that event.

Communication may be exposed or run beside computation, which hides it. The account also has both for each phase.
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.bench.runner import table
from fcsd.distill.step.engine import PREFIX
from fcsd.errors import BadInputError
from fcsd.parallel.trace import LAUNCHES, ON_DEVICE, RANGE, read_content

BETWEEN = "between"  # the name for events that were launched outside of every phase
STATES = ("computing", "exposed", "idle")


class Event(NamedTuple):
    """A kernel, copy or fill on the device: its start and end in µs, and the phase in which it was launched."""

    start: float
    end: float
    phase: str
    communication: bool


@dataclass(frozen=True)
class Account:
    """The timeline of one rank, in ms.

    Attributes:
        total: time from the start of the first device event to the end of the last.
        phases: for each phase, in order of appearance, the ms in each of ``STATES``; all of them add up to ``total``.
        communication: for each phase that communicates, the ms in which its communication runs, and how many of them
            are hidden: something computes meanwhile, in whatever phase.
        synchronisations: for each phase, how often the host waited for the device, and for how many ms in all.
    """

    total: float
    phases: dict[str, dict[str, float]]
    communication: dict[str, tuple[float, float]]
    synchronisations: dict[str, tuple[int, float]]


def read_account(path: Path) -> Account:
    """Computes the account of a gzipped or plain Chrome trace.

    Raises:
        BadInputError: the file is not such a trace, or nothing in it ran on a device.
    """
    events = read_content(path)["traceEvents"]

    def named(range_: str) -> str | None:
        return range_.removeprefix(PREFIX) if range_.startswith(PREFIX) else None

    phases = _Ranges(events, named)
    collectives = _Ranges(events, lambda name: name if RANGE.fullmatch(name) else None, by_thread=True)
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in LAUNCHES and "correlation" in e["args"]}
    found = []
    for event in events:
        if event.get("cat") in ON_DEVICE:
            launch = launches.get(event["args"].get("correlation"))
            name = phases.at(launch) if launch is not None else None
            sent = event["name"].startswith("nccl") or (launch is not None and collectives.at(launch) is not None)
            found.append(Event(event["ts"], event["ts"] + event["dur"], name or BETWEEN, sent))
    if not found:
        raise BadInputError(f"{path}: nothing ran on a device", hint="profile on a GPU")
    waits: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in LAUNCHES and "Synchronize" in event["name"]:
            name = phases.at(event) or BETWEEN
            count, ms = waits.get(name, (0, 0.0))
            waits[name] = count + 1, ms + event["dur"] / 1e3
    return _partition(sorted(found), waits)


class _Ranges:
    """Finds the innermost of the host's ranges that contains a moment; ranges may be nested."""

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
        # The ranges that began before the event are tried from the latest to the earliest. The first one that has not
        # ended is the innermost.
        while place >= 0:
            if event["ts"] <= ranges[place][1]:
                return ranges[place][2]
            place -= 1
        return None


def _partition(events: list[Event], waits: dict[str, tuple[int, float]]) -> Account:
    """Counts each interval between two neighbouring starts or ends of events for one phase and one state."""
    phases: dict[str, dict[str, float]] = {}
    communication: dict[str, tuple[float, float]] = {}

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
        for name in {event.phase for event in running if event.communication}:
            sent, hidden = communication.get(name, (0.0, 0.0))
            ms = (end - start) / 1e3
            communication[name] = sent + ms, hidden + (ms if computing else 0.0)
        if computing:
            count(computing[0].phase, "computing", end - start)
        elif running:
            count(running[0].phase, "exposed", end - start)
        else:
            count(events[upcoming].phase, "idle", end - start)
    return Account((borders[-1] - borders[0]) / 1e3, phases, communication, waits)


def to_text(account: Account) -> str:
    """Formats the account as a table with a line for each phase and for their sum.

    Below it are the communication of each phase, and the host's waits.
    """
    phases = {**account.phases, "sum": {s: sum(row[s] for row in account.phases.values()) for s in STATES}}
    rows = {}
    for name, row in phases.items():
        whole = sum(row.values())
        states = {f"{state} ms": f"{row[state]:.2f}" for state in STATES}
        rows[name] = {**states, "all ms": f"{whole:.2f}", "share": f"{whole / account.total:.1%}"}
    sent = ", ".join(
        f"{name} {ms:.1f} ms ({hidden / ms:.0%} hidden)" for name, (ms, hidden) in account.communication.items()
    )
    told = ", ".join(f"{name} {count} ({ms:.1f} ms)" for name, (count, ms) in account.synchronisations.items())
    below = [f"communication: {sent or 'none'}", f"the host waited for the device: {told or 'never'}"]
    return "\n".join([table(rows, "phase"), *below])
