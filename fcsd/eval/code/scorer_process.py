"""The scoring process from outside: start it, hear its heartbeat, end it when it falls silent, start it once more.

A scoring process may be killed, stopped, or hang with a judgement half done; whoever waits for it, perhaps with all
ranks of a training run, must be told soon. While it works it sends an empty line every ``BEAT_S`` seconds.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fcsd.errors import FcsdError

BEAT_S = 1.0
# Two silences and two starts are what a caller waits at most to hear that there is no verdict: less than 30 s.
SILENCE_S = 12.0
ATTEMPTS = 2


def ask_scorer(job: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """The reply of ``fcsd.eval.code.scorer`` to a job.

    Args:
        budget_s: wall seconds for an attempt, however alive it seems.

    Raises:
        FcsdError: the process died, fell silent or took too long, twice.
    """
    reason = ""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as complaints:
            asked.write(json.dumps(job).encode())
            asked.seek(0)
            with _start(asked, complaints) as process:
                try:
                    reply = _listen(process, time.monotonic() + budget_s, budget_s)
                except TimeoutError as error:
                    reason = str(error)
                    continue
                finally:
                    process.kill()
            if process.returncode == 0 and reply:
                return json.loads(reply)
            complaints.seek(0)
            reason = complaints.read().decode(errors="replace").strip()[-500:] or f"status {process.returncode}"
    raise FcsdError(f"the scoring process failed twice: {reason}")


def _start(asked: Any, complaints: Any) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "fcsd.eval.code.scorer"]
    return subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=complaints, env=environment)


def _listen(process: subprocess.Popen[bytes], deadline: float, budget_s: float) -> bytes:
    """All that the process says but its heartbeat, once it has ended.

    Raises:
        TimeoutError: it is silent, or its time is over.
    """
    assert process.stdout is not None
    said = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"it took more than {budget_s:.0f} s")
            if selector.select(min(left, SILENCE_S)):
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                said += chunk
            elif left > SILENCE_S:
                raise TimeoutError(f"it said nothing for {SILENCE_S:.0f} s")
    process.wait()
    return bytes(said).strip()
