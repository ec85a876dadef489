"""Starts `fcsd serve` for a converted model, asks it one question over HTTP, and stops it.

    python scripts/vllm_server.py MODEL --seconds N

It prints one row for ``scripts/vllm_report.py``. The row is right if the server answered, gives the same answer again,
and left no process behind after SIGTERM.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

OPTIONS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 28), "--gpu-memory-utilization", "0.1")
QUESTION = "Question: What is 12 plus 30? Answer:"


def ask(url: str, path: str, **body: Any) -> Any:
    """The JSON answer of the server to a GET, or with a body to a POST."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def group_alive(group: int) -> bool:
    """Whether a process group has a process left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Start, ask twice, stop, and print the row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=int, required=True, help="until the server is killed")
    given = parser.parse_args()
    row: dict[str, Any] = dict(server="fcsd serve", right=False)
    print("START " + json.dumps(dict(server="fcsd serve")), flush=True)
    start = time.perf_counter()
    command = [sys.executable, "-m", "fcsd", "serve", str(given.model), "--port", str(free_port()), "--"]
    server = subprocess.Popen(
        [*command, *OPTIONS, "--enforce-eager"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    limit = threading.Timer(given.seconds, os.killpg, (server.pid, signal.SIGKILL))
    limit.start()
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().rstrip("/").removesuffix("/v1")
        if not url:
            raise RuntimeError(f"the server printed no URL; it ended with {server.wait()}")
        row["ready_s"] = round(time.perf_counter() - start, 1)
        name = ask(url, "/v1/models")["data"][0]["id"]
        asked = dict(model=name, prompt=QUESTION, max_tokens=16, temperature=0)
        answers = [ask(url, "/v1/completions", **asked)["choices"][0]["text"] for _ in range(2)]
        row["answer"] = answers[0]
        server.send_signal(signal.SIGTERM)
        row["exit_status"] = server.wait()
        row["right"] = answers[0] == answers[1] and not group_alive(server.pid)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        limit.cancel()
        if group_alive(server.pid):
            os.killpg(server.pid, signal.SIGKILL)
    print("ROW " + json.dumps(row | dict(seconds=round(time.perf_counter() - start, 1))), flush=True)


if __name__ == "__main__":
    main()
