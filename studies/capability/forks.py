"""Starts commands of fcsd as forks of one process that has imported what they need.

A run of the study spends more time on importing its libraries than on loading its model and its text. Here a fork
server (``multiprocessing``) imports ``imported.py`` once. It computes nothing and does not touch a GPU, so each fork
can choose its GPU and make its own CUDA context. What a fork executes afterwards is the command line of fcsd, as in a
process of its own.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# torch then counts GPUs without CUDA, which could not be used in forks any more.
COUNTS_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Forks:
    """A fork server for commands of fcsd.

    Args:
        env: the environment in which the libraries are imported. It becomes that of this process as well.
        imported: the module that the server imports.
    """

    def __init__(self, env: dict[str, str], imported: str = "studies.capability.imported") -> None:
        os.environ.update(env | COUNTS_WITHOUT_CUDA)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([imported])
        self._imported = imported
        self._lock = threading.Lock()  # multiprocessing expects one thread to start and to wait for processes

    def start(self, words: Sequence[str], log: Path, env: dict[str, str]) -> "Fork":
        """Start ``fcsd WORDS``; its output goes to the end of ``log``."""
        process = self._context.Process(target=_command, args=(list(words), log, env))
        with self._lock:
            process.start()
        return Fork(process, self._lock)

    def work(self, device: str, log: Path, env: dict[str, str]) -> bool:
        """Whether the libraries can be imported and a fork can compute on the device; ``log`` gets the error if not."""
        process = self._context.Process(target=_compute, args=(self._imported, device, log, env))
        with self._lock:
            process.start()
        return Fork(process, self._lock).wait() == 0


class Fork:
    """A command that was started; it has the methods of ``subprocess.Popen`` that the study uses."""

    def __init__(self, process: BaseProcess, lock: threading.Lock) -> None:
        self._process, self._lock = process, lock

    def terminate(self) -> None:
        """Ask the command to end."""
        self._process.terminate()

    def wait(self) -> int:
        """The exit code of the command, or the negative number of the signal that ended it."""
        wait([self._process.sentinel])
        with self._lock:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _become(log: Path, env: dict[str, str]) -> None:
    """Take on the environment, the folder and the output of a command."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _command(words: list[str], log: Path, env: dict[str, str]) -> None:
    _become(log, env)
    sys.argv = ["fcsd", *words]
    from fcsd.cli.main import main

    main()


def _compute(imported: str, device: str, log: Path, env: dict[str, str]) -> None:
    _become(log, env)
    import_module(imported)  # the server passes over a module that it cannot import
    import torch

    torch.ones(1, device=device).sum().item()
