"""vLLM's servers as processes: started, told from those that failed, and ended with all that they started."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fcsd.bench.serve.client import MODEL
from fcsd.bench.serve.variants import Variant
from fcsd.errors import FcsdError
from fcsd.serve.server import answers, end_with_parent, kill_group
from fcsd.serve.vllm.support import RIGHT_RESULTS

_GRACE = 15.0  # seconds that a server has to end its processes before they are killed
# vLLM's processes put their name, and then a level, a time and a place in the source, before each line.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): \S")
_GENERAL = ("Engine core initialization failed", "died unexpectedly", "WorkerProc initialization failed")


class Server(NamedTuple):
    """The servers of a variant.

    Attributes:
        ports: the ports at which they listen.
        processes: the processes, each the first of its group.
        logs: the files of their messages.
        seconds: how long they took to answer.
    """

    ports: list[int]
    processes: "list[subprocess.Popen[bytes]]"
    logs: list[Path]
    seconds: float


def start(
    variant: Variant, path: Path, options: Sequence[str], logs: Path, gpus: Sequence[str], until: float
) -> Server:
    """Start the servers of a variant, and wait until all answer.

    Args:
        variant: the variant.
        path: the directory of its model.
        options: options of ``vllm serve`` that all variants have. For replicas they are those of one GPU.
        logs: a folder for the messages.
        gpus: the names of the GPUs, as in CUDA_VISIBLE_DEVICES; replicas get one each.
        until: ``time.monotonic()`` at which the servers have to answer.

    Raises:
        FcsdError: a server ended or did not answer in time. The message is its last error.
        KeyboardInterrupt: SIGINT came. Whatever happens, no process is left.
    """
    begun, found = time.monotonic(), Server([], [], [], 0.0)
    try:
        for number in range(max(1, variant.replicas)):
            one = {"CUDA_VISIBLE_DEVICES": gpus[number]} if variant.replicas and gpus else {}
            port, log = _free_port(), logs / f"{re.sub(r'[^a-z0-9]+', '-', variant.name.lower())}-{number}.log"
            found.ports.append(port)
            found.logs.append(log)
            found.processes.append(
                _popen(path, [*options, *variant.options], port, log, {**variant.environment, **one})
            )
        while not all(answers(f"http://127.0.0.1:{port}/health") for port in found.ports):
            if (problem := failed(found)) is not None:
                raise FcsdError(problem)
            if time.monotonic() > until:
                raise FcsdError("its server did not answer in time", "Give it more --minutes.")
            time.sleep(0.1)
    except BaseException:
        stop(found)
        raise
    return found._replace(seconds=time.monotonic() - begun)


def failed(server: Server) -> str | None:
    """The last error of a server that has ended; None if all run."""
    for process, log in zip(server.processes, server.logs, strict=True):
        if process.poll() is not None:
            return last_error(log.read_text(errors="replace")) or f"its server ended with {process.returncode}"
    return None


def last_error(messages: str) -> str:
    """The line of vLLM's messages that says why it failed: the last that is an error and not a consequence of one."""
    lines = [_PREFIX.sub("", line).strip() for line in messages.splitlines()]
    errors = [line for line in lines if _ERROR.match(line) and not any(text in line for text in _GENERAL)]
    spoken = errors or [line for line in lines if line]
    return spoken[-1][:300] if spoken else ""


def stop(server: Server) -> None:
    """End the servers and all processes that they started. A second call does nothing."""
    for process in server.processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + _GRACE
    for process in server.processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_group(process)


def _popen(
    path: Path, options: Sequence[str], port: int, log: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, *options]
    inherited = {name: value for name, value in os.environ.items() if name != RIGHT_RESULTS}  # bounds are wrong
    with log.open("wb") as messages:
        return subprocess.Popen(
            command, stdout=messages, stderr=messages, stdin=subprocess.DEVNULL, env={**inherited, **environment},
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
