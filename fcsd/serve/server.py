"""The command ``fcsd serve``: checks a checkpoint, runs vLLM's server on it, and leaves no process behind."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType

from fcsd.checkpoint import open_checkpoint
from fcsd.errors import ConfigError, FcsdError, Stopped
from fcsd.launch.world import gpus_here
from fcsd.models.wiring_block import DESYNC
from fcsd.parallel.all_reduce.ways import read_ways
from fcsd.serve.vllm.communicator import ASKED, format_of
from fcsd.serve.vllm.support import RIGHT_RESULTS, require_vllm

PORT = 8000  # vLLM's own default
MOST_GRAPHED = 2560  # tokens of a step with a CUDA graph
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 60.0  # seconds that vLLM has to end its processes after a signal
_OURS = {"--tensor-parallel-size": "--gpus", "--port": "--port", "--model": "MODEL"}


def serve(
    model: str,
    *,
    gpus: int | None = None,
    port: int = PORT,
    options: Sequence[str] = (),
    all_reduce: str | None = None,
    table: Path | None = None,
    graphs: tuple[int, int] | None = None,
    ready: Callable[[str], None],
) -> None:
    """Serve a model by vLLM until a signal or an error ends it.

    Args:
        model: a directory or hub id, of a converted model or of an original.
        gpus: the tensor-parallel degree; None is that of a Desync model, or else the most GPUs here that divide the
            attention heads.
        all_reduce: ``host`` or ``host:FORMAT``: sums through memory of the host where that is faster than vLLM's own
            way; None leaves them to vLLM.
        table: the ways to sum of a converted model, as ``fcsd bench serve --table`` writes them.
        graphs: tokens of a prompt and requests at once, for ``graph_sizes``; None leaves the graphs to vLLM.
        ready: called with the server's URL once it answers.

    Raises:
        BadInputError: the checkpoint is not one, or is damaged.
        ConfigError: vLLM or fcsd's plugin is missing, the port is in use, or an option or the format of
            ``all_reduce`` does not go with the model.
        FcsdError: vLLM ended by itself with an error.
        KeyboardInterrupt: SIGINT ended the server.
        Stopped: another signal ended it.
    """
    environment = {} if all_reduce is None else {ASKED: all_reduce}
    format = None if all_reduce is None else format_of(all_reduce)  # refuses another word
    source = open_checkpoint(model)
    path, config = source.path, source.config
    rewired = config.rewired or {"wiring": "standard"}
    require_vllm("fcsd serve", rewired=config.rewired is not None)
    if config.foreign:
        raise ConfigError(f"{path}: vLLM does not have this model's wiring; it was rewired by another program")
    desync = rewired["wiring"] in DESYNC
    if gpus is None:
        heads = config.text.get("num_attention_heads", 0)
        gpus = int(rewired["tp_degree"]) if desync else gpus_here(lambda count: heads % count == 0)
    if all_reduce is not None and gpus == 1:
        raise ConfigError(f"--all-reduce {all_reduce}: one GPU sums nothing", "Give --gpus 2 or more.")
    if format is not None and (width := config.text.get("hidden_size")):  # some configs have another name for it
        format.row_bytes(width)  # refuses groups that do not divide the rows of the model
    if desync and rewired["tp_degree"] != gpus:
        degree = rewired["tp_degree"]
        raise ConfigError(
            f"{path}: {rewired['wiring']} was converted for {degree} tensor-parallel ranks, not {gpus}",
            f"Add --gpus {degree}.",
        )
    for option in options:
        if own := _ours(option):
            raise ConfigError(f"{option} behind -- is set by fcsd serve", f"Use {own} before --.")
    told = [*options, *_further(table, graphs, gpus, options)]
    _check_port(port)
    source.verify()  # last, because it takes seconds
    code = run(_command(path, model, gpus, port, told), _url(port, options), ready, environment=environment)
    if code:
        raise FcsdError(f"vLLM ended with exit code {code}", "Its messages above say why.")


def _further(table: Path | None, graphs: tuple[int, int] | None, gpus: int, options: Sequence[str]) -> Iterator[str]:
    """The options of vLLM that stand for ``table`` and ``graphs``.

    Raises:
        ConfigError: the same option stands behind ``--``.
        BadInputError: the table is none for so many GPUs.
    """
    asked: dict[str, tuple[str, object]] = {}
    if table is not None:
        read_ways(str(table), gpus)
        asked["--additional-config"] = "--table", {"fcsd": {"reduce": str(table.resolve())}}
    if graphs is not None:
        asked["--compilation-config"] = "--prompt-tokens", {"cudagraph_capture_sizes": graph_sizes(*graphs)}
    for name, (own, value) in asked.items():
        if any(option.split("=")[0].replace("_", "-") == name for option in options):
            raise ConfigError(f"{name} behind -- is what {own} sets", "Leave one of them out.")
        yield from (name, json.dumps(value))


def graph_sizes(prompt: int, requests: int) -> list[int]:
    """Tokens of the steps that get CUDA graphs: answers alone, and one or two prompts beside them.

    vLLM pads a step to the next size, and its own sizes end at 512 tokens. These are closest where most steps are, and
    end at ``MOST_GRAPHED`` tokens: a longer step computes for so long that its launches do not show.

    Args:
        prompt: tokens of a prompt.
        requests: requests at once, each of which is one token of a step while it is answered.
    """
    answers = {1, 2, 4, *range(8, requests, max(8, requests // 8)), requests}
    between = {requests << power for power in range(1, prompt.bit_length()) if requests << power < prompt}
    one = {prompt + requests * quarter // 4 for quarter in range(5)} | {prompt * 5 // 4, prompt * 3 // 2}
    two = {2 * prompt + requests * quarters // 4 for quarters in (0, 1, 2, 4, 8)}
    return sorted(size for size in answers | between | one | two if size <= MOST_GRAPHED)


def _ours(option: str) -> str | None:
    """What sets a vLLM option before ``--``; None if fcsd does not set it. vLLM takes underscores and prefixes, too."""
    name = option.partition("=")[0].replace("_", "-")
    if re.fullmatch(r"-tp\d*", name):
        return "--gpus"
    abbreviated = name.startswith("--") and len(name) > 3
    return next((own for full, own in _OURS.items() if abbreviated and full.startswith(name)), None)


def _url(port: int, options: Sequence[str]) -> str:
    """The server's address as this machine reaches it.

    Raises:
        ConfigError: the server would listen on a Unix socket.
    """
    given: dict[str, str] = {}
    for option, after in zip(options, [*options[1:], ""], strict=False):
        name, _, value = option.partition("=")
        given[name.replace("_", "-")] = value or after
    if "--uds" in given:
        raise ConfigError("fcsd serve has no Unix sockets", "Leave out --uds, or start vLLM itself.")
    host = given.get("--host", "")
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'https' if '--ssl-certfile' in given else 'http'}://{host}:{port}"


def _command(path: Path, model: str, gpus: int, port: int, options: Sequence[str]) -> list[str]:
    named = any(option.startswith("--served-model-name") for option in options)
    return [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(path)),
        *("--tensor-parallel-size", str(gpus), "--port", str(port)),
        *([] if named else ["--served-model-name", model]),
        *options,
    ]


def run(
    command: Sequence[str],
    url: str,
    ready: Callable[[str], None],
    grace: float = _GRACE,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a server in a process group of its own, and end the whole group.

    SIGINT, SIGTERM and SIGHUP are passed on to the server. If it is still there ``grace`` seconds later, its group is
    killed. If this process is killed itself, the kernel sends SIGTERM to the server.

    Args:
        command: the server's command line. What it writes to stdout goes to stderr.
        url: where it listens; it is ready once ``URL/health`` answers with 200.
        ready: called with ``url`` once it is ready.
        grace: see above.
        environment: further variables of the server.

    Returns:
        The server's exit code.

    Raises:
        KeyboardInterrupt: SIGINT ended the server.
        Stopped: another signal ended it.
    """
    caught: list[tuple[int, float]] = []
    server = subprocess.Popen(
        command,
        stdout=2,
        env={**os.environ, RIGHT_RESULTS: "1", **environment},
        start_new_session=True,
        preexec_fn=end_with_parent,
    )

    def pass_on(number: int, frame: object) -> None:
        caught.append((number, time.monotonic()))
        if server.poll() is None:
            server.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    told = False
    try:
        while server.poll() is None and not (caught and time.monotonic() - caught[0][1] > grace):
            if not told and not caught and answers(f"{url}/health"):
                told = True
                ready(url)
            time.sleep(0.2)
    finally:
        kill_group(server)
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught and caught[0][0] == signal.SIGINT:
        raise KeyboardInterrupt
    if caught:
        raise Stopped(caught[0][0])
    return server.returncode


def end_with_parent() -> None:
    """Ask the kernel to send SIGTERM to the calling process when its parent ends: a ``preexec_fn`` of ``Popen``."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def kill_group(server: "subprocess.Popen[bytes]") -> None:
    """Kill all processes of the group of a process that was started as the first of its own, and wait for it."""
    with contextlib.suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def answers(url: str) -> bool:
    """Whether ``url`` answers with status 200 within a second."""
    # The server is this process's own, and its certificate may name another host.
    unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), unverified)
    try:
        with direct.open(url, timeout=1.0) as answer:
            return answer.status == 200
    except (OSError, HTTPException):  # not there yet, an error status, or something else that answers at the port
        return False


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}", "Choose another port.") from None
