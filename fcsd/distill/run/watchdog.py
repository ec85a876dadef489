"""Ends the run on every rank if one rank is lost or stuck, without waiting for the communication library's timeout.

Once a second, a thread of each rank writes a message to a store. The message says where the rank's main thread is, and
for how long this thread has completed no step. The watching thread needs only the interpreter, so it continues while
the main thread waits in a collective. It counts its own rounds instead of time. If the whole job is suspended and
continued later, no rank therefore counts as lost.
"""

import faulthandler
import json
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from fcsd.errors import PeerLostError
from fcsd.foreign_errors import translate
from fcsd.launch.world import World

_ROUND = 1.0  # seconds between two messages of a rank to the store
_SILENCE = 120.0  # a rank without a message for so many seconds is lost; no call holds the interpreter for so long
_MOMENT = 3.0  # seconds in which the main thread may still raise an error of its own, which says more
_WAITING = ("/torch/distributed/", "/deepspeed/comm/", "/fcsd/parallel/deferred.py")
_HINT = "the first error in that rank's output is the cause; the same command resumes from the last checkpoint"


class Watchdog:
    """Tells the other ranks that this rank is alive, and watches them. ``watched`` creates it.

    Args:
        stuck_seconds: the longest time between two calls of ``beat`` on any rank.
        silence: the longest time in seconds without a message of a rank.
    """

    def __init__(self, world: World, stuck_seconds: float, silence: float) -> None:
        self._rank, self._stuck, self._silence = world.rank, stuck_seconds, silence
        self._main = threading.get_ident()
        self._rounds, self._idle = 0, -math.inf  # no step is expected before the first beat
        self._store = _store(world)
        self._tell()
        here = _host()
        everyone = world.everywhere(lambda: (here, os.getpid()))  # now every rank has written a message
        self._keys = [str(rank) for rank in range(world.size)]
        self._signs: list[Any] = [None] * world.size
        self._heard = [0] * world.size  # the round in which the last message of each rank came
        self._handles: dict[int, int] = {}  # pidfd -> rank on this host; it becomes readable when the process ends
        self._ends = select.poll()
        for rank, (host, pid) in enumerate(everyone):
            with suppress(OSError):  # a sandbox may lack pidfds; then only the messages are watched
                if host == here and rank != world.rank:
                    handle = os.pidfd_open(pid)
                    self._handles[handle] = rank
                    self._ends.register(handle, select.POLLIN)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Records that the main thread has completed a step."""
        self._idle = 0

    def leave(self) -> None:
        """Ends the watch. This is called when all ranks have finished their steps, or when one has failed."""
        self._left.set()
        self._thread.join()

    def ended(self, wait: float = 0.0) -> str | None:
        """A message that names the ranks on this host that have ended; None if none ends within ``wait`` seconds."""
        ranks = [self._handles[handle] for handle, _ in self._ends.poll(wait * 1000)] if self._handles else []
        return f"{_named(ranks)} ended while the run was going on" if ranks else None

    def _watch(self) -> None:
        while not self._left.wait(_ROUND):
            self._rounds, self._idle = self._rounds + 1, self._idle + 1
            problem = self._problem()
            if problem and not self._left.wait(_MOMENT):
                self._end(problem)

    def _problem(self) -> str | None:
        if ended := self.ended():
            return ended
        try:
            self._tell()
            signs = [json.loads(text) for text in self._store.multi_get(self._keys)]
        except RuntimeError:
            return self.ended(_MOMENT) or "the process that holds the run together is gone"
        self._heard = [
            heard if new == old else self._rounds
            for heard, new, old in zip(self._heard, signs, self._signs, strict=True)
        ]
        self._signs = signs
        if silent := self._silent():
            return f"{_named(silent)} sent no message for {self._silence:g} seconds"
        if max(sign["idle"] for sign in signs) * _ROUND <= self._stuck:
            return None
        blamed = [rank for rank, sign in enumerate(signs) if not sign["waits"]] or range(len(signs))
        places = "; ".join(f"rank {rank} in {sign['place']}" for rank, sign in enumerate(signs))
        return f"no step for {self._stuck:g} seconds, because of {_named(blamed)}: {places}"

    def _tell(self) -> None:
        place, waits = _whereabouts(self._main)
        sign = {"round": self._rounds, "idle": self._idle, "place": place, "waits": waits}
        self._store.set(str(self._rank), json.dumps(sign))

    def _silent(self) -> list[int]:
        return [rank for rank, heard in enumerate(self._heard) if (self._rounds - heard) * _ROUND > self._silence]

    def _end(self, problem: str) -> None:
        rank = f"[rank {self._rank}] " if len(self._keys) > 1 else ""
        print(f"{rank}error: {problem}\n{rank}hint: {_HINT}\n{rank}stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        for handle, peer in self._handles.items():
            if peer in self._silent():  # a stopped process cannot end by itself
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        os._exit(PeerLostError.exit_code)


@contextmanager
def watched(world: World, stuck_seconds: float, silence: float = _SILENCE) -> Iterator[Watchdog]:
    """Runs a watchdog during the block, which all ranks must enter.

    Args:
        stuck_seconds: the longest time between two calls of ``beat`` on any rank.
        silence: the longest time in seconds without a message of a rank.

    Raises:
        PeerLostError: a collective failed because a rank is gone; the message names it.
    """
    watchdog = Watchdog(world, stuck_seconds, silence)
    try:
        yield watchdog
    except RuntimeError as error:
        watchdog.leave()
        known = translate(error)
        # The end of another rank may be noticed a moment after the collective that failed because of it.
        if (known is None or isinstance(known, PeerLostError)) and (ended := watchdog.ended(_MOMENT)):
            raise PeerLostError(ended, _HINT) from error
        raise
    finally:
        watchdog.leave()


def _store(world: World) -> Any:
    """Opens a second connection to the store of the run, because the main thread may be waiting on the first."""
    from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if world.size == 1:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    return PrefixStore("fcsd/signs of life", store)


def _host() -> str:
    """The host name and the process namespace. Processes with the same result see each other's process ids."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def _named(ranks: Any) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _whereabouts(thread: int) -> tuple[str, bool]:
    """The line that a thread executes, and whether the thread waits for other ranks there."""
    frame = sys._current_frames()[thread]
    file = frame.f_code.co_filename
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})", any(part in file for part in _WAITING)
