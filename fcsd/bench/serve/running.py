"""vLLM's servers as processes, from the directory of random weights that they load to the end of all they started."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig

from fcsd.bench.serve.client import MODEL
from fcsd.bench.serve.variants import Variant
from fcsd.bench.shapes import SHAPES
from fcsd.checkpoint import read_object
from fcsd.errors import FcsdError
from fcsd.models.build import arch_of
from fcsd.models.config_keys import PREFIX
from fcsd.models.wiring_block import Wiring
from fcsd.serve.server import answers, end_with_parent, kill_group
from fcsd.serve.vllm.config import base_config
from fcsd.serve.vllm.support import RIGHT_RESULTS

_PORTS = range(20000, 32768, 2)  # below those that a kernel gives to connections
_GRACE = 15.0  # seconds that a server has to end its processes before they are killed
# vLLM's processes put their name, and then a level, a time and a place in the source, before each line.
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception)|error): \S")
_GENERAL = (
    "Engine core initialization failed", "died unexpectedly", "WorkerProc initialization failed",
    "EngineCore encountered an issue",
)  # fmt: skip


class Server(NamedTuple):
    """The servers of a variant.

    Attributes:
        ports: the ports at which they listen.
        processes: the processes, each the first of its group.
        logs: the files of their messages.
        begun: ``time.monotonic()`` at which they were started.
        claims: what keeps the ports from other runs of this program, see ``claim_port``.
    """

    ports: list[int]
    processes: "list[subprocess.Popen[bytes]]"
    logs: list[Path]
    begun: float
    claims: list[socket.socket]


def write_directory(model: str, config: PretrainedConfig, wiring: Wiring, path: Path, positions: int) -> Path:
    """Make a directory that vLLM can load with random weights: the config.json of the original or of a wiring.

    Args:
        model: a name in ``fcsd.bench.shapes``, or a directory.
        wiring: the wiring of the result; the original if it has no layers.
        positions: the tokens that the model takes at least, which may be more than its own number.

    Returns:
        ``path``.
    """
    path.mkdir()
    source = path if model in SHAPES else Path(model)
    if model in SHAPES:
        config.save_pretrained(path)
    fields = read_object(source / "config.json")
    fields, arch = base_config(fields, source) or fields, arch_of(config)
    fields["architectures"] = [arch.causal_lm]
    if wiring.layers:
        fields |= {"model_type": PREFIX + arch.model_type, "architectures": [arch.wired_causal_lm]}
        fields["fcsd"] = wiring.to_block()
    text = fields.get("text_config", fields)
    text["max_position_embeddings"] = max(text.get("max_position_embeddings", 0), positions)
    (path / "config.json").write_text(json.dumps(fields))
    return path


def start(variant: Variant, path: Path, options: Sequence[str], logs: Path, gpus: Sequence[str]) -> Server:
    """Start the servers of a variant.

    Args:
        options: options of ``vllm serve`` that all variants have. For replicas they are those of one GPU.
        logs: a folder for the messages.
        gpus: the names of the GPUs, as in CUDA_VISIBLE_DEVICES; replicas get one each.
    """
    found = Server([], [], [], time.monotonic(), [])
    try:
        for number in range(max(1, variant.replicas)):
            one = {"CUDA_VISIBLE_DEVICES": gpus[number]} if variant.replicas and gpus else {}
            log = logs / f"{re.sub(r'[^a-z0-9]+', '-', variant.name.lower())}-{number}.log"
            port, claim = claim_port()
            found.ports.append(port)
            found.claims.append(claim)
            found.logs.append(log)
            found.processes.append(
                _popen(path, [*options, *variant.options], port, log, {**variant.environment, **one})
            )
    except BaseException:
        stop(found)
        raise
    return found


def await_answers(servers: Mapping[str, Server], until: float) -> Iterator[tuple[str, float | str]]:
    """Wait until servers that start at the same time answer.

    Args:
        until: ``time.monotonic()`` at which all have to answer.

    Yields:
        A name, and the seconds that its servers took or why they failed, in the order in which they are ready.
    """
    waiting = dict(servers)
    while waiting:
        for name, server in list(waiting.items()):
            if all(answers(f"http://127.0.0.1:{port}/health") for port in server.ports):
                outcome: float | str | None = time.monotonic() - server.begun
            elif (outcome := failed(server)) is None and time.monotonic() > until:
                outcome = "its server did not answer in time; give it more --minutes"
            if outcome is not None:
                del waiting[name]
                yield name, outcome
        time.sleep(0.1)


def failed(server: Server) -> str | None:
    """The last error of a server that has ended; None if all run."""
    for process, log in zip(server.processes, server.logs, strict=True):
        if process.poll() is not None:
            return last_error(log.read_text(errors="replace")) or f"its server ended with {process.returncode}"
    return None


def left_out(server: Server, ignored: Sequence[str]) -> str | None:
    """The line in which vLLM says that it leaves an option of a variant out; None if no server does."""
    for log in server.logs:
        for line in log.read_text(errors="replace").splitlines():
            if any(text in line for text in ignored):
                return f"vLLM left it out: {_PREFIX.sub('', line).strip()[:300]}"
    return None


def last_error(messages: str) -> str:
    """The line of vLLM's messages that says why it failed: the last that is an error and not a consequence of one."""
    spoken = _errors(messages) or [line for line in map(_bare, messages.splitlines()) if line]
    return spoken[-1][:300] if spoken else ""


def error_behind(server: Server) -> str | None:
    """The last error in the messages of a server that may still run; None if there is none."""
    errors = [error for log in server.logs for error in _errors(log.read_text(errors="replace"))]
    return errors[-1][:300] if errors else None


def _errors(messages: str) -> list[str]:
    lines = map(_bare, messages.splitlines())
    return [line for line in lines if _ERROR.match(line) and not any(text in line for text in _GENERAL)]


def _bare(line: str) -> str:
    return _PREFIX.sub("", line).strip()


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
    for claim in server.claims:
        claim.close()


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


def claim_port() -> tuple[int, socket.socket]:
    """A port for a server, and a socket at the port after it, which is held as long as the server runs.

    A server needs some seconds until it has its port. No other run of this program can choose it meanwhile, because a
    run has to have the port after it, too.

    Raises:
        FcsdError: there is no free port.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", port + 1))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            return port, claim
        except OSError:
            claim.close()
    raise FcsdError(f"no port from {_PORTS.start} to {_PORTS.stop} is free", "end some of the programs that hold them")
