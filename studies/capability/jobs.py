"""Jobs of a piece of work: which one starts when and on which GPU, and the end of all when the time is over."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from studies.capability.forks import ROOT, Fork, Forks

PREEMPTED = (143, -signal.SIGTERM)
SAVING = 20.0  # seconds between the request to end and the end of the time


class OutOfTimeError(Exception):
    """A command was ended because the time of this piece is over; a later piece continues it."""


class Clock:
    """Runs commands until the time is over, and then asks those that still run to save and end."""

    def __init__(self, minutes: float) -> None:
        self._ends = time.monotonic() + 60 * minutes - SAVING
        self._running: set[subprocess.Popen[bytes] | Fork] = set()
        self._lock = threading.Lock()
        self._timer = threading.Timer(max(0.0, self._ends - time.monotonic()), self._end)
        self._timer.daemon = True
        self._timer.start()

    def run(self, command: list[str], log: Path, env: dict[str, str], forks: Forks | None = None) -> None:
        """Run a command; its output goes to the end of ``log``.

        Args:
            command: the words of the command line.
            forks: runs the command as ``fcsd COMMAND``; None starts an ordinary process.

        Raises:
            OutOfTimeError: the time was over before the command ended.
            RuntimeError: the command failed.
        """
        with self._lock:
            if time.monotonic() >= self._ends:
                raise OutOfTimeError
            log.parent.mkdir(parents=True, exist_ok=True)
            if forks is None:
                with log.open("ab") as file:
                    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
            else:
                process = forks.start(command, log, env)
            self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.remove(process)
        if code in PREEMPTED:
            raise OutOfTimeError
        if code:
            raise RuntimeError(f"exit code {code}: {' '.join(command)}\n{log.read_text(errors='replace')[-1500:]}")

    def stop(self) -> None:
        """The time no longer counts."""
        self._timer.cancel()

    def _end(self) -> None:
        with self._lock:
            for process in self._running:
                process.terminate()


@dataclass(frozen=True)
class Job:
    """A text, a sweep or a run: ``do`` takes the number of a GPU, after the jobs that it ``needs``.

    Attributes:
        load: what it asks of the GPU, as the share of the teacher's tokens that it trains on.
    """

    name: str
    needs: tuple[str, ...]
    do: Callable[[int], None]
    load: float = 0.0


def together(jobs: list[Job], at_once: int, gpus: int) -> bool:
    """Do jobs, several at a time: always the first one whose needs are done, on the GPU with the smallest load.

    A run that waits for its text or its sweep keeps a place, because the runs after it may take the GPUs for minutes.
    A failure is printed and stops only the jobs that need this one. Returns whether all jobs ended.
    """
    waiting, running, done, failed = list(jobs), dict[Future[None], tuple[Job, int]](), set[str](), set[str]()
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            for job in [job for job in waiting if failed & set(job.needs)]:
                waiting.remove(job)
                failed.add(job.name)
            free = at_once - len(running)
            for job in list(waiting):
                ready = done.issuperset(job.needs)
                if free == 0 or not (ready or (job.load and running)):
                    continue
                free -= 1
                if not ready:
                    continue
                waiting.remove(job)
                loads = [[other.load for other, at in running.values() if at == gpu] for gpu in range(gpus)]
                gpu = min(range(gpus), key=lambda gpu: (sum(loads[gpu]), len(loads[gpu])))
                running[pool.submit(job.do, gpu)] = job, gpu
            if not running:
                return not failed
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, _ = running.pop(future)
                error = future.exception()
                (failed if error else done).add(job.name)
                if error and not isinstance(error, OutOfTimeError):
                    print(f"failed: {error}", file=sys.stderr)
