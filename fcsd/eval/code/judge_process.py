"""Starts the judging process for its caller, waits for it, and starts it once more when it fails.

The process may be killed, stopped, or hang. Its caller, which may be all ranks of a training run, must notice that
soon. Therefore the process sends an empty line every ``BEAT_S`` seconds while it works.
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
# A caller notices a failure at the latest after two silent periods and two starts, which is less than 30 s.
SILENCE_S = 12.0
ATTEMPTS = 2


def ask_judge(job: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """The reply of ``fcsd.eval.code.judge_worker`` to a job.

    Args:
        budget_s: wall seconds for one attempt.

    Raises:
        FcsdError: the process died, sent nothing for ``SILENCE_S`` seconds or took too long, twice.
    """
    reason = ""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as errors:
            request.write(json.dumps(job).encode())
            request.seek(0)
            with _start(request, errors) as process:
                try:
                    reply = _listen(process, time.monotonic() + budget_s, budget_s)
                except TimeoutError as error:
                    reason = str(error)
                    continue
                finally:
                    process.kill()
            if process.returncode == 0 and reply:
                return json.loads(reply)
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip()[-500:] or f"status {process.returncode}"
    raise FcsdError(f"the judging process failed twice: {reason}")


def _start(request: Any, errors: Any) -> subprocess.Popen[bytes]:
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "fcsd.eval.code.judge_worker"]
    return subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, stderr=errors, env=environment)


def _listen(process: subprocess.Popen[bytes], deadline: float, budget_s: float) -> bytes:
    """The output of the process, without its heartbeat, once it has ended.

    Raises:
        TimeoutError: the process sends nothing, or the deadline (monotonic seconds) has passed.
    """
    assert process.stdout is not None
    output = bytearray()
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
                output += chunk
            elif left > SILENCE_S:
                raise TimeoutError(f"it sent nothing for {SILENCE_S:.0f} s")
    process.wait()
    return bytes(output).strip()
