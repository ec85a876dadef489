"""The judging process: it reads a job on stdin, judges every answer in a child process, and writes verdicts on stdout.

`fcsd.eval.code.judge_process` starts it. It imports neither torch nor transformers, and it has a single thread, so
that it may fork. A child extracts one program, runs it and compares its outputs; whatever an answer does to its child,
the other answers are judged all the same.
"""

import ctypes
import gc
import importlib
import json
import math
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from fcsd.errors import FcsdError
from fcsd.eval.code.judge import READING_SHARE, Outcome, Problem, Verdict, problem_from, verdict_from
from fcsd.eval.code.judge_process import BEAT_S
from fcsd.eval.code.memory_groups import remove_stale
from fcsd.eval.code.one_program import judge_answer, uniform_verdict
from fcsd.eval.code.sandbox import Sandbox, find_sandbox
from fcsd.eval.code.sandbox_runner import decode

ATTEMPTS = 2  # a child that was killed from outside is started once more


@dataclass
class Child:
    """A process that judges the answer with this index, and what it has written so far."""

    index: int
    process: int
    output: int
    written: bytearray = field(default_factory=bytearray)


def main() -> None:
    send_heartbeat(math.inf)
    job = json.load(sys.stdin)
    send_heartbeat(time.monotonic() + job["budget_s"])
    try:
        verdicts = judge_all(job)
        reply: dict[str, Any] = {"verdicts": [asdict(verdict) for verdict in verdicts]}
    except FcsdError as error:
        reply = {"error": str(error), "hint": error.hint}
    signal.setitimer(signal.ITIMER_REAL, 0)
    json.dump(reply, sys.stdout)


def send_heartbeat(deadline: float) -> None:
    """Write an empty line every `BEAT_S` seconds; end this process at `deadline` (monotonic seconds)."""

    def beat(*_: object) -> None:
        if time.monotonic() > deadline:
            os._exit(1)
        os.write(1, b"\n")

    signal.signal(signal.SIGALRM, beat)
    signal.setitimer(signal.ITIMER_REAL, BEAT_S, BEAT_S)


def judge_all(job: dict[str, Any]) -> list[Verdict]:
    """One verdict per answer, in order.

    Raises:
        FcsdError: there is no sandbox.
    """
    sandbox = find_sandbox(accept_unsafe_exec=job["accept_unsafe_exec"])
    problems = [problem_from(decode(fields)) for fields in job["problems"]]
    workers, timeout_s, form = (job["settings"][name] for name in ("workers", "timeout_s", "form"))
    # Imported once here instead of in every child.
    importlib.import_module("evalplus.sanitize" if form == "chat" else "evalplus.eval")

    def judged(index: int) -> Verdict:
        return judge_answer(problems[index], job["generations"][index], sandbox, timeout_s, form)

    verdicts: dict[int, Verdict] = {}
    attempts = [0] * len(problems)
    waiting = list(reversed(range(len(problems))))
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < workers:
                index = waiting.pop()
                attempts[index] += 1
                child = start(index, lambda index=index: judged(index))
                running.register(child.output, selectors.EVENT_READ, child)
            for key, _ in running.select():
                child = key.data
                written = os.read(child.output, 1 << 16)
                child.written += written
                if written:
                    continue
                running.unregister(child.output)
                os.close(child.output)
                code = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
                if code == -signal.SIGKILL and attempts[child.index] < ATTEMPTS:
                    waiting.append(child.index)
                else:
                    verdicts[child.index] = verdict_of(child, code, problems[child.index], sandbox, timeout_s)
    if sandbox.group_parent:
        remove_stale(sandbox.group_parent)
    return [verdicts[index] for index in range(len(problems))]


def start(index: int, judged: Callable[[], Verdict]) -> Child:
    """Fork a child that writes a verdict, or the traceback of an exception, to a pipe."""
    output, input_ = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if process:
        os.close(input_)
        return Child(index, process, output)
    gc.disable()  # results hold no cycles, and collecting garbage takes longer than reading millions of items
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives this process
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the caller waits until stdout closes
        written = json.dumps(asdict(judged())).encode()
        status = 0
    except BaseException:
        written = traceback.format_exc().encode()
    with os.fdopen(input_, "wb") as pipe:
        pipe.write(written)
    os._exit(status)


def verdict_of(child: Child, code: int, problem: Problem, sandbox: Sandbox, timeout_s: int) -> Verdict:
    """The verdict of a child that ended with exit status `code`, or was ended by the signal `-code`."""
    if code == 0:
        return verdict_from(json.loads(child.written))
    if code > 0:
        lines = child.written.decode(errors="replace").strip().splitlines()
        outcome = Outcome("error", f"the judging process failed: {lines[-1] if lines else code}")
    elif code == -signal.SIGKILL:
        outcome = Outcome("error", f"the judging process was killed {ATTEMPTS} times")
    elif code == -signal.SIGXCPU:
        detail = f"its answer or results took more than {READING_SHARE * timeout_s} s of CPU to be read and compared"
        outcome = Outcome("fail", detail)
    else:
        outcome = Outcome("fail", f"its answer or results ended the process that read them (signal {-code})")
    return uniform_verdict(problem, outcome, sandbox)


if __name__ == "__main__":
    main()
