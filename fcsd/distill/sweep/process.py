"""Starts each run of a sweep in its own process, because DeepSpeed keeps process groups and memory until the exit."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from types import FrameType

from fcsd.errors import ConfigError, PreemptedError
from fcsd.launch import own_code

_ALONE = 5.0  # seconds in which a run that Ctrl-C reached from the terminal ends by itself


@dataclass(frozen=True)
class Exit:
    """How a process ended: its exit code, which is negative after a signal, and the reason if it failed."""

    code: int
    error: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the process."""
        return self.code in (130, -signal.SIGINT)

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM ended the process."""
        return self.code in (128 + signal.SIGTERM, -signal.SIGTERM)


Launch = Callable[[Path], Exit]


def launcher(gpus: int | None, accept_unsafe_exec: bool, command: str | None = None) -> Launch:
    """The function that runs a recipe in new processes, ``gpus`` of them or those that a command starts.

    Args:
        accept_unsafe_exec: whether ``--accept-unsafe-exec`` is passed on to the runs.
        command: starts ``fcsd distill`` with the words behind it in all processes of a run, on several nodes, and ends
            with its exit code; None starts them on this machine.

    Raises:
        ConfigError: torchrun started this process, or the command has a quote without an end.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError("a sweep starts its own processes", "Start it once, with --gpus N instead of torchrun.")
    options = ["--accept-unsafe-exec"] if accept_unsafe_exec else []
    if command is not None:
        try:
            return partial(_run, command=[*shlex.split(command), *options])
        except ValueError as error:
            raise ConfigError(f"--launch {command}: {error}", "Write it as you would in a shell.") from None
    options += ["--gpus", str(gpus)] if gpus else []
    return partial(_run, command=[*own_code.command(), "distill", *options])


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Ends the process with exit code 143 if SIGTERM comes during the block, while no run is in progress.

    While a run is in progress, the signal is passed on to it instead. Only the main thread may enter the block.
    """

    def end(number: int, frame: FrameType | None) -> None:
        # SystemExit is not an Exception, which a library might catch.
        print("error: preempted between two runs\nhint: the same command continues the sweep", file=sys.stderr)
        raise SystemExit(PreemptedError.exit_code)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(recipe: Path, command: list[str]) -> Exit:
    """Runs ``fcsd distill OPTIONS RECIPE`` and passes its messages on to stderr at once.

    SIGTERM is passed on to the run, which then ends in its usual way. If the run was in its last step, it ends as if
    no signal had come; the exit code is that of a terminated run nevertheless. Ctrl-C reaches the run from the
    terminal. A SIGINT that was sent to this process alone is passed on after ``_ALONE`` seconds.
    """
    child: subprocess.Popen[str] | None = None
    signalled, interrupted, error = False, False, ""

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        signalled = True
        if child is not None:
            child.terminate()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted and child is not None:
            late = Timer(_ALONE, child.send_signal, [signal.SIGINT])  # does nothing once the run has ended
            late.daemon = True
            late.start()
        interrupted = True

    # The handlers are there before the run starts, which does not inherit them, so that no signal is lost.
    ours = {signal.SIGTERM: pass_on, signal.SIGINT: interrupt}
    handlers = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        with subprocess.Popen(
            [*command, str(recipe)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as child:
            if signalled:
                child.terminate()
            if interrupted:
                child.send_signal(signal.SIGINT)
            assert child.stderr is not None
            for line in child.stderr:
                if line != "error: interrupted\n":  # the sweep says it once for both
                    sys.stderr.write(line)
                if found := re.match(r"(?:\[rank \d+\] )?error: (.+)", line):
                    error = error or found[1]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    code = child.returncode
    if interrupted and code == 0:
        return Exit(128 + signal.SIGINT, "ended by Ctrl-C after its last step")
    if signalled and code == 0:
        return Exit(PreemptedError.exit_code, "ended by SIGTERM after its last step")
    return Exit(code, error or (f"killed by signal {-code}" if code < 0 else f"exit code {code}" if code else ""))
