"""Starts `fcsd serve` for the converted teacher, asks it one question over HTTP, and stops it.

    python -m benchmarks.vllm server FOLDER --seconds N

It prints one row for ``report``. The row is right if the server answered, gives the same answer
again, and left no process behind after SIGTERM. The model is made in FOLDER. The exit status is 0 if the row is right.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.vllm.cases import TEACHER, made
from benchmarks.vllm.report import Row, report

from fcsd.bench.serve.running import claim_port

ARGUMENTS = {
    "folder": Path,
    "--seconds": dict(type=int, required=True, help="until the server is killed"),
}
OPTIONS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 28), "--gpu-memory-utilization", "0.1")
QUESTION = "Question: What is 12 plus 30? Answer:"


def ask(url: str, path: str, **body: Any) -> Any:
    """The JSON answer of the server to a GET, or with a body to a POST."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def adopt() -> None:
    """Let processes that outlive their parents become children of this process, so that ``children`` sees them."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def children(seconds: float) -> bool:
    """Whether this process has a child left when so much time has passed."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not ended:
            time.sleep(0.1)
    return True


def serve(folder: Path, seconds: float) -> Row:
    """Start the server, ask twice, and stop it; kill it after some seconds.

    Returns:
        ``ready_s``, ``answer``, ``exit_status`` and ``right``.

    Raises:
        RuntimeError: the server printed no URL.
    """
    model = made(folder, TEACHER)["converted"]
    adopt()
    start = time.perf_counter()
    port, claim = claim_port()
    command = [sys.executable, "-m", "fcsd", "serve", str(model), "--port", str(port), "--"]
    server = subprocess.Popen(
        [*command, *OPTIONS, "--enforce-eager"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    limit = threading.Timer(seconds, os.killpg, (server.pid, signal.SIGKILL))
    limit.start()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped, too
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().rstrip("/").removesuffix("/v1")
        if not url:
            raise RuntimeError(f"the server printed no URL; it ended with {server.wait()}")
        ready = round(time.perf_counter() - start, 1)
        name = ask(url, "/v1/models")["data"][0]["id"]
        asked = dict(model=name, prompt=QUESTION, max_tokens=16, temperature=0)
        answers = [ask(url, "/v1/completions", **asked)["choices"][0]["text"] for _ in range(2)]
        server.send_signal(signal.SIGTERM)
        status = server.wait()
        right = answers[0] == answers[1] and not children(5.0)
        return dict(ready_s=ready, answer=answers[0], exit_status=status, right=right)
    finally:
        limit.cancel()
        claim.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
            os.killpg(server.pid, signal.SIGKILL)


def main(given: Any) -> bool:
    """Report the row; whether it is wrong."""
    return not report(dict(server="fcsd serve"), serve, given.folder, given.seconds)["right"]
