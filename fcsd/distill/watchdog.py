"""A rank that is lost or stuck ends the run on every rank, whatever the communication library would wait for.

Each rank has a thread that tells the others, through a store, that it lives and since when its main thread has made
no step. It needs the interpreter only, so it goes on while the main thread waits in a collective.
"""

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from fcsd.errors import PeerLostError
from fcsd.foreign_errors import translate
from fcsd.launch import World

_TICK = 1.0  # seconds between two signs of life
_SILENCE = 120.0  # seconds without one after which a rank is lost; a long call that holds the interpreter is shorter
_MOMENT = 3.0  # for the main thread to come forward with an error of its own, which says more
_WAITING = ("/torch/distributed/", "/deepspeed/comm/", "/fcsd/parallel/deferred.py")
_HINT = "the first error in that rank's output is the cause; the same command resumes from the last checkpoint"


class Watchdog:
    """This rank's signs of life, and its view of the others'.

    Args:
        stuck_seconds: longest time between two ``beat``s of any rank; nothing is expected before the first.
    """

    def __init__(self, world: World, stuck_seconds: float) -> None:
        self._world, self._limit = world, stuck_seconds
        self._main = threading.get_ident()
        self._last_beat: float | None = None
        self._ticks = 0
        self._heard: dict[int, tuple[Any, float]] = {}  # rank -> its last sign and when it came
        self._handles: dict[int, int] = {}  # rank on this host -> pidfd
        self._store = None if world.size == 1 else _store()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """The main thread has come a step further."""
        self._last_beat = time.monotonic()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The main thread is done or has failed: nothing more is expected of it. Fits ``ExitStack.push``."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            with suppress(RuntimeError):  # the store may be gone, and with it the run
                self._tell("done" if error is None else "failed")

    def lost(self) -> str | None:
        """Which rank is gone, if any."""
        if self._store is not None:
            try:
                self._listen()
            except RuntimeError:
                return "the process that holds the run together is gone"
        for rank, (sign, came) in self._heard.items():
            if sign["state"] == "done":
                continue
            if sign["state"] == "failed" or self._has_ended(rank):
                return f"rank {rank} ended while the run was going on"
            silent = time.monotonic() - came
            if silent > min(_SILENCE, self._limit):
                return f"rank {rank} has given no sign of life for {silent:.0f} seconds"
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(_TICK):
            with suppress(RuntimeError):  # `lost` meets it as well
                self._tell("alive")
            problem = self.lost() or self._stuck()
            if problem and not self._stopped.wait(_MOMENT):
                self._end(problem)

    def _tell(self, state: str) -> None:
        self._ticks += 1
        idle = 0.0 if self._last_beat is None else time.monotonic() - self._last_beat
        place, waits = _whereabouts(self._main)
        sign = {"state": state, "tick": self._ticks, "idle": idle, "place": place, "waits": waits}
        self._heard[self._world.rank] = ({**sign, "state": "done"}, 0.0)  # never lost to itself
        if self._store is not None:
            self._store.set(str(self._world.rank), json.dumps({**sign, "host": _host(), "pid": os.getpid()}))

    def _listen(self) -> None:
        peers = [rank for rank in range(self._world.size) if rank != self._world.rank]
        for rank in peers:
            if not self._store.check([str(rank)]):  # type: ignore[union-attr]
                continue
            sign = json.loads(self._store.get(str(rank)))  # type: ignore[union-attr]
            if rank not in self._heard and sign["host"] == _host():
                with suppress(OSError):
                    self._handles[rank] = os.pidfd_open(sign["pid"])
            if rank not in self._heard or self._heard[rank][0]["tick"] != sign["tick"]:
                self._heard[rank] = (sign, time.monotonic())

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank on this host is gone; a pidfd can be read from then on."""
        handle = self._handles.get(rank)
        return handle is not None and bool(select.select([handle], [], [], 0)[0])

    def _stuck(self) -> str | None:
        idle = {rank: sign for rank, (sign, _) in self._heard.items() if sign["idle"] > self._limit}
        if not idle:
            return None
        suspects = [rank for rank in sorted(idle) if not idle[rank]["waits"]] or sorted(idle)
        places = "; ".join(f"rank {rank} in {sign['place']}" for rank, sign in sorted(self._signs().items()))
        names = ", ".join(f"rank {rank}" for rank in suspects)
        return f"no step for {self._limit:g} seconds, because of {names}: {places}"

    def _signs(self) -> dict[int, Any]:
        return {rank: sign for rank, (sign, _) in self._heard.items()}

    def _end(self, problem: str) -> None:
        rank = f"[rank {self._world.rank}] " if self._world.size > 1 else ""
        print(f"{rank}error: {problem}\n{rank}hint: {_HINT}\n{rank}stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        for peer, handle in self._handles.items():
            if time.monotonic() - self._heard[peer][1] > 2 * _MOMENT:  # stopped, it cannot end by itself
                with suppress(OSError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        os._exit(PeerLostError.exit_code)


@contextmanager
def watched(world: World, stuck_seconds: float) -> Iterator[Watchdog]:
    """A watchdog over the block.

    Raises:
        PeerLostError: a collective failed because a rank is gone; the message names it.
    """
    dog = Watchdog(world, stuck_seconds)
    try:
        yield dog
    except RuntimeError as error:
        known = translate(error)
        if world.size > 1 and (known is None or isinstance(known, PeerLostError)):
            dog.leave(type(error), error, None)
            if problem := _soon(dog):
                raise PeerLostError(problem, _HINT) from error
        raise
    finally:
        _, error, trace = sys.exc_info()
        dog.leave(type(error) if error else None, error, trace)


def _soon(dog: Watchdog) -> str | None:
    """Who is lost; a peer's end may be seen a moment after the collective that it broke."""
    for _ in range(int(_MOMENT / _TICK)):
        if problem := dog.lost():
            return problem
        time.sleep(_TICK)
    return None


def _store() -> Any:
    """A connection of its own to the store of the run: the main thread may be waiting on the other."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    return PrefixStore("fcsd/signs of life", store)


def _host() -> str:
    """Processes with the same answer see each other's process ids."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def _whereabouts(thread: int) -> tuple[str, bool]:
    """The innermost line of a thread, and whether it waits for other ranks."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nothing", False
    file = frame.f_code.co_filename
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})", any(part in file for part in _WAITING)
