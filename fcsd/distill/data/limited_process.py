"""A function in a child process with limits on CPU time and memory.

A chat template is a program that came with a model. A loop in it cannot be interrupted from another thread of the same
process, and what it allocates is allocated for the whole run. The operating system can stop a child process.
"""

import gc
import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

CPU_SECONDS = 20.0  # per call; CPU time, so that a loaded machine leaves out the same rows as an idle one
MEMORY = 1 << 30  # bytes that a call may allocate beyond what the parent process had


class LimitExceededError(Exception):
    """The child process was stopped; the message completes a sentence that begins with the name of the function."""


class LimitedProcess:
    """Calls ``function`` in a child process, one call at a time, and starts another child after one was stopped.

    The child is forked: it starts in milliseconds and knows whatever ``function`` needs. It runs no thread and touches
    no device. It ends when the ``with`` block or the parent process ends.

    Args:
        function: takes and returns what can be pickled. It must catch its own exceptions: one that leaves it ends the
            child.

    Attributes:
        answered: how many calls returned.
        stopped: how many calls exceeded a limit.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.answered = self.stopped = 0
        self._function = function
        self._child: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, argument: Any) -> Any:
        """The value of ``function`` for an argument.

        Raises:
            LimitExceededError: the call used more than ``CPU_SECONDS``, or the child ended otherwise.
        """
        _, pipe = self._child = self._child or self._start()
        try:
            pipe.send(argument)
            result = pipe.recv()
        except (EOFError, OSError) as error:
            self.stopped += 1
            if self._stop() == -signal.SIGPROF:
                raise LimitExceededError(f"ran for more than {CPU_SECONDS:g} s") from error
            raise LimitExceededError("ended its process") from error
        self.answered += 1
        return result

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._function, theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _stop(self) -> int | None:
        """Ends the child, if there is one; its exit code."""
        if self._child is None:
            return None
        process, pipe = self._child
        self._child = None
        pipe.close()  # an idle child ends by itself
        process.join(timeout=1.0)
        process.kill()
        process.join()
        return process.exitcode


def _serve(function: Callable[[Any], Any], pipe: Connection, parents_end: Connection) -> None:
    """Answers calls until the parent closes its end."""
    parents_end.close()
    gc.freeze()  # what the parent owns, tensors on a device among it, is not collected here
    for number in (signal.SIGPROF, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, in the middle of C code too
        result = function(argument)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(result)
