"""Judges generated programs: `score` takes problems and answers, and returns verdicts.

`score` passes problems and programs to a fresh process (`fcsd.eval.code.judge_worker`), never to a fork of the caller,
which may hold CUDA and NCCL. That process forks one child with limits on time and memory per program. The child
extracts the program from the answer, runs it in a sandbox and compares the outputs outside of the sandbox. Expected
values never enter the sandbox. A program sees only its own code and the inputs. Its printed text, its exit status and
the objects that it overwrites do not influence the verdict.

A program may use `timeout_s` seconds of CPU time, or four times what the reference needed where that is more. The
limit is CPU time because on a busy machine a limit on wall time would fail right programs; wall time is limited to
three times that plus five seconds.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fcsd.errors import FcsdError
from fcsd.eval.code.problems import Problem
from fcsd.eval.code.sandbox_runner import encode

Status = Literal["pass", "fail", "timeout", "error"]
Form = Literal["program", "chat"]

READING_SHARE = 2  # extraction and comparison of one program may take this many times `timeout_s` of CPU time
# CPU seconds that a program may take. lm-eval allows three seconds of wall time, so a busy machine lowers its scores.
TIMEOUT_S = 10
ATTEMPTS = 2  # for the judging process, and in it for a program without a verdict
# The judging process may be killed, stopped, or hang. It sends an empty line every `BEAT_S` seconds, so that a caller,
# which may be all ranks of a training run, notices that after two silent periods and two starts: in less than 30 s.
BEAT_S = 1.0
SILENCE_S = 12.0


@dataclass(frozen=True)
class Outcome:
    """The result of one set of tests.

    `error` means that no verdict was reached (a process was killed, the reference fails); it says nothing about the
    program.
    """

    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """The results of one program.

    `plus` is EvalPlus' plus: the base and the plus inputs are all right. It is None where there are no plus inputs.
    """

    task_id: str
    base: Outcome
    plus: Outcome | None
    sandbox: str


def score(
    problems: Sequence[Problem],
    generations: Sequence[str],
    *,
    workers: int | None = None,
    timeout_s: int = TIMEOUT_S,
    form: Form = "program",
    accept_unsafe_exec: bool = False,
    budget_s: float | None = None,
) -> list[Verdict]:
    """Judge one generation per problem.

    Args:
        workers: number of programs that run at once; one per CPU of this process by default.
        timeout_s: CPU seconds per program. Extraction and comparison may use twice as much again.
        form: what a generation is: `program` runs as it is; `chat` is an answer in prose and markdown, in which
            EvalPlus' sanitizer finds the code.
        budget_s: wall seconds for all programs. The default is twice the sum of their wall limits, divided among
            `workers`, plus a minute.

    Raises:
        FcsdError: there is no sandbox, or the judging process died, sent nothing or exceeded `budget_s`, twice. A
            score of only some of the programs is never returned.
    """
    if len(problems) != len(generations):
        raise ValueError(f"{len(problems)} problems but {len(generations)} generations")
    workers = workers or len(os.sched_getaffinity(0))
    if budget_s is None:
        rounds = -(-len(problems) // workers)
        budget_s = 60 + rounds * 2 * wall_limit((1 + READING_SHARE) * timeout_s)
    job = {
        "problems": [encode(asdict(problem)) for problem in problems],
        "generations": list(generations),
        "settings": {"workers": workers, "timeout_s": timeout_s, "form": form},
        "accept_unsafe_exec": accept_unsafe_exec,
        "budget_s": budget_s,
    }
    reply = ask_judge(job, budget_s)
    if "error" in reply:
        raise FcsdError(reply["error"], hint=reply["hint"])
    return [verdict_from(row) for row in reply["verdicts"]]


def pass_at_1(verdicts: Sequence[Verdict], tests: Literal["base", "plus"]) -> float:
    """Share of the problems that passed.

    Raises:
        FcsdError: a verdict is missing or is an error, so the share is unknown.
    """
    outcomes = [(verdict.task_id, getattr(verdict, tests)) for verdict in verdicts]
    broken = [
        f"{task}: {outcome.detail if outcome else f'no {tests} inputs'}"
        for task, outcome in outcomes
        if outcome is None or outcome.status == "error"
    ]
    if broken or not outcomes:
        first = f" (first: {broken[0]})" if broken else ""
        raise FcsdError(f"no {tests} score: {len(broken)} of {len(outcomes)} problems have no verdict{first}")
    return sum(outcome.status == "pass" for _, outcome in outcomes) / len(outcomes)


def judged(
    problems: Sequence[Problem], programs: Sequence[str], accept_unsafe_exec: bool, form: Form = "program"
) -> tuple[list[Verdict], str]:
    """The verdicts on all programs of a task, and the level of the sandbox.

    Raises:
        FcsdError: there is no sandbox, or a program has no verdict.
    """
    verdicts = score(problems, programs, form=form, accept_unsafe_exec=accept_unsafe_exec)
    pass_at_1(verdicts, "base")  # raises where a verdict is missing
    levels = {verdict.sandbox for verdict in verdicts}
    if len(levels) != 1:
        raise FcsdError(f"programs of one task ran in different sandboxes: {', '.join(sorted(levels))}")
    return verdicts, levels.pop()


def wall_limit(cpu_s: float) -> float:
    """Wall seconds that a program with a limit of `cpu_s` seconds of CPU time may take."""
    return 3 * cpu_s + 5


def ask_judge(job: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """The reply of `fcsd.eval.code.judge_worker` to a job.

    Args:
        budget_s: wall seconds for one attempt.

    Raises:
        FcsdError: the process died, sent nothing for `SILENCE_S` seconds or took too long, twice.
    """
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "fcsd.eval.code.judge_worker"]
    reason = ""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as errors:
            request.write(json.dumps(job).encode())
            request.seek(0)
            with subprocess.Popen(
                command, stdin=request, stdout=subprocess.PIPE, stderr=errors, env=environment
            ) as process:
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


def verdict_from(row: dict[str, Any]) -> Verdict:
    """The verdict of which `dataclasses.asdict` made `row`."""
    plus = row["plus"] and Outcome(**row["plus"])
    return Verdict(row["task_id"], Outcome(**row["base"]), plus, row["sandbox"])
