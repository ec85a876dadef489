"""Runs a function in a child process with limits on CPU time and memory.

A chat template is a program that came with a model. A loop in it cannot be interrupted from another thread of the same
process, and its memory counts as memory of the run. The operating system, however, can stop a child process.
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

CPU_SECONDS = 20.0  # per call; CPU time is limited so that the load of the machine does not decide which rows are used
MEMORY = 1 << 30  # bytes that a child may allocate in addition to the memory of its parent


class LimitExceededError(Exception):
    """The child process was stopped. The message is a verb phrase, to which the caller adds the subject."""


class LimitedProcess:
    """Calls ``function`` in a child process, one call at a time.

    If the child was stopped, the next call starts another one. The child is forked, so it starts in milliseconds and
    has all objects that ``function`` needs. It starts no thread and uses no device. It ends when the ``with`` block or
    the parent process ends.

    Args:
        function: its argument and its result must be picklable. It must catch its own exceptions, because an exception
            that it does not catch ends the child.

    Attributes:
        answered: the number of calls that returned.
        stopped: the number of calls that exceeded a limit or ended the child.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.answered = self.stopped = 0
        self._function = function
        self._child: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, argument: Any) -> Any:
        """Calls ``function`` with an argument and returns its result.

        Raises:
            LimitExceededError: the call used more than ``CPU_SECONDS``, or the child ended for another reason.
        """
        _, pipe = self._child = self._child or self._start()
        try:
            pipe.send(argument)
            result = pipe.recv()
        except (EOFError, OSError) as error:
            self.stopped += 1
            if self.close() == -signal.SIGPROF:
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

    def close(self) -> int | None:
        """Ends the child, if there is one, and returns its exit code. The next call starts another one."""
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
    """The loop of the child: answers calls until the parent closes its end of the pipe."""
    parents_end.close()
    gc.freeze()  # the child must not collect objects of the parent, such as tensors on a device
    for number in (signal.SIGPROF, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes the pipe
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
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, even inside C code
        result = function(argument)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(result)
