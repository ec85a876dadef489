"""Handles SIGTERM and SIGUSR1: the run finishes its step, saves if there is time, and ends with exit code 143."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fcsd.errors import PreemptedError
from fcsd.launch.world import World, first_rank

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_MARGIN = 0.1  # the share of the grace period that is reserved for ending the process
_ECHO = 1.0  # seconds in which a second signal is ignored, since the launcher may repeat a signal sent to the group


class Preemption:
    """Records whether this run was asked to end, and how much time it still has.

    Until ``defer`` is called, a signal ends the process at once. Afterwards the main thread calls ``time_left`` after
    each step. A second signal ends the process immediately, whatever the main thread is doing. The process also ends
    when the time is over.

    Args:
        grace_seconds: the time between a signal and the moment at which the process must have ended.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds * (1 - _MARGIN)
        self._asked: float | None = None
        self._timer: threading.Timer | None = None
        self._checkpoint: Callable[[], Path | None] | None = None

    def defer(self, checkpoint: Callable[[], Path | None]) -> None:
        """From now on, a signal lets the run finish its step. ``checkpoint`` returns the last committed checkpoint."""
        self._checkpoint = checkpoint

    def time_left(self, world: World) -> float:
        """The seconds until the first rank must have ended, the same on all ranks; infinity if no signal came."""
        own = math.inf if self._asked is None else self._asked + self._grace - time.monotonic()
        return world.lowest(own)

    def notice(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            if self._checkpoint is None:
                # SystemExit is not an Exception, which a library that is loading something might catch.
                print(f"{signal.Signals(number).name}: ended before the first step; nothing is lost", file=sys.stderr)
                raise SystemExit(PreemptedError.exit_code)
            self._timer = threading.Timer(self._grace, self._end, ("no time is left to finish the step and save",))
            self._timer.daemon = True
            self._timer.start()
        elif now - self._asked > _ECHO:
            self._end("a second signal")

    def close(self) -> None:
        """Cancels the timer, because the run has ended by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, reason: str) -> None:
        if self._checkpoint is not None and first_rank():
            error = preempted(reason, self._checkpoint())
            print(f"error: {error}\nhint: {error.hint}", file=sys.stderr, flush=True)
        os._exit(PreemptedError.exit_code)


@contextmanager
def preemptible(grace_seconds: float) -> Iterator[Preemption]:
    """Handles SIGTERM and SIGUSR1 during the block, which only the main thread may enter."""
    preemption = Preemption(grace_seconds)
    before = {number: signal.signal(number, preemption.notice) for number in _SIGNALS}
    try:
        yield preemption
    finally:
        preemption.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def preempted(reason: str, checkpoint: Path | None) -> PreemptedError:
    """The error with which a run ends after a signal."""
    if checkpoint is None:
        return PreemptedError(
            f"preempted: {reason}; there is no checkpoint yet",
            "Start the same command again; the run then begins from its first step.",
        )
    return PreemptedError(
        f"preempted: {reason}; the last checkpoint is {checkpoint}",
        "Start the same command again; it resumes the run from there.",
    )
