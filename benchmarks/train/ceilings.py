"""Measures the largest part of each dispatch and combine that computation can hide.

By FarSkip equation 9, a collective is hidden for as long as the computation between its launch and its await lasts.
This duration is called its cover. The cover is measured in a pass that sends nothing, as the time of the compute stream
between launch and await. The time on the wire is measured by sending rows of the same sizes while nothing else runs.
The part that can be hidden is the smaller of the two times.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcsd.bench.timing import together
from fcsd.models.wiring import LayerWiring
from fcsd.parallel.overlap import Schedule
from fcsd.parallel.transports.transport import Splits, Work, all_to_all

# The collectives of a layer in the order of their launches: without recompute, and with recompute before backward.
_ORDER = [("dispatch", "fwd"), ("combine", "fwd"), ("combine", "bwd"), ("dispatch", "bwd")]
_RECOMPUTED = [*_ORDER[:2], ("dispatch", "recompute"), ("combine", "recompute"), *_ORDER[2:]]

_REPEATS = 3  # of an exchange that is timed alone

_Moment = Any  # a CUDA event, or seconds on a machine without CUDA


def _now(device: torch.device) -> _Moment:
    """Marks the current position of the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: _Moment, end: _Moment) -> float:
    """The time from ``start`` to ``end``; the device must have reached both."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


class NoWire:
    """A transport that sends nothing. It returns rows of the right shape with finite values, without any work."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def __call__(self, rows: Tensor, splits: Splits, group: Any, keep: bool) -> tuple[Tensor, Work]:
        count = sum(splits.receives)
        if self._rows is None or self._rows.shape[0] < count:
            self._rows = torch.randn(2 * count, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return self._rows[:count], _Arrived()


class _Arrived:
    """The work of an exchange that is complete from the start."""

    def wait(self) -> None: ...


@dataclass
class _Call:
    """A collective that was not sent: what it would have sent, and the moments of its launch and its await."""

    splits: Splits
    width: int
    dtype: torch.dtype
    group: Any
    launched: _Moment
    device: torch.device
    awaited: _Moment = None

    def wait(self) -> None:
        self.awaited = _now(self.device)


class CoverMeter:
    """Records collectives instead of sending them. Its ``choose`` is an argument for one call of ``overlap``."""

    def __init__(self) -> None:
        self._no_wire = NoWire()
        self._layers = 0
        self._calls: dict[int, list[_Call]] = defaultdict(list)

    def choose(self, _: LayerWiring, schedule: Schedule) -> Schedule:
        """The same schedule with this meter as its transport."""
        self._layers += 1
        return replace(schedule, transport=partial(self._note, self._layers - 1))

    def _note(self, layer: int, rows: Tensor, splits: Splits, group: Any, keep: bool) -> tuple[Tensor, Work]:
        received, _ = self._no_wire(rows, splits, group, keep)
        call = _Call(splits, rows.shape[1], rows.dtype, group, _now(rows.device), rows.device)
        self._calls[layer].append(call)
        return received, call

    def measure(self, run: Callable[[], None]) -> list["Window"]:
        """Measures the windows of one forward and backward pass, which ``run`` executes; every rank must call this."""
        self._calls.clear()
        run()
        windows = []
        for layer, calls in sorted(self._calls.items()):
            if calls[0].device.type == "cuda":
                torch.cuda.synchronize()
            names = _ORDER if len(calls) == len(_ORDER) else _RECOMPUTED
            for (kind, passes), call in zip(names, calls, strict=True):
                cover = _milliseconds(call.launched, call.awaited)
                windows.append(Window(kind, passes, layer, cover, _on_the_wire(call)))
        return windows


@dataclass(frozen=True)
class Window:
    """One collective, with the time of the computation that can hide it and its time on the wire.

    Attributes:
        kind: ``dispatch`` or ``combine``.
        passes: ``fwd``, ``recompute`` or ``bwd``.
        layer: the layer's number, from 0.
        cover: ms of the computation between launch and await.
        wire: ms of the exchange alone.
    """

    kind: str
    passes: str
    layer: int
    cover: float
    wire: float

    @property
    def hideable(self) -> float:
        return min(self.cover, self.wire)


def _on_the_wire(call: _Call) -> float:
    """Median milliseconds of the exchange alone. All ranks start at the same time."""
    rows = torch.zeros(sum(call.splits.sends), call.width, dtype=call.dtype, device=call.device)

    def exchange() -> None:
        _, work = all_to_all(rows, call.splits, call.group, True)
        work.wait()

    return statistics.median(together(exchange, call.device) for _ in range(_REPEATS))


def ceiling(windows: list[Window], passes: str, *, without_last: bool = False) -> float:
    """The largest share, from 0 to 1, of the time of dispatch and combine in a pass that computation can hide.

    Args:
        without_last: leaves out the last layer's combine, or its gradient, because no computation can hide it.
    """
    last = max(window.layer for window in windows)
    counted = [
        window
        for window in windows
        if window.passes == passes and not (without_last and (window.kind, window.layer) == ("combine", last))
    ]
    wire = sum(window.wire for window in counted)
    return sum(window.hideable for window in counted) / wire if wire else 0.0


def both(windows: list[Window], passes: str) -> tuple[float, float]:
    """The ceiling of a pass with the last layer's combine, and without it."""
    return ceiling(windows, passes), ceiling(windows, passes, without_last=True)


def passes_of(windows: list[Window]) -> list[str]:
    """The passes of a step in order of appearance: fwd, bwd, and recompute if there is one."""
    return list(dict.fromkeys(window.passes for window in windows))


def to_text(windows: list[Window]) -> str:
    """Formats the medians over the layers, a line for each collective and pass, and the ceiling of each pass."""
    lines = [f"{'':20s} {'cover ms':>9s} {'wire ms':>9s}"]
    for kind, passes in dict.fromkeys((window.kind, window.passes) for window in windows):
        mine = [window for window in windows if (window.kind, window.passes) == (kind, passes)]
        cover = statistics.median(window.cover for window in mine)
        wire = statistics.median(window.wire for window in mine)
        lines.append(f"{kind + ' ' + passes:20s} {cover:9.3f} {wire:9.3f}")
    for passes in passes_of(windows):
        most, trimmed = both(windows, passes)
        lines.append(f"at most {most:.1%} can be hidden in {passes}, {trimmed:.1%} without the last layer's combine")
    return "\n".join(lines)
