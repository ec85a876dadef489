"""An answer that takes minutes or gigabytes to read fails alone; the answers beside it are judged."""

import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from fcsd.eval.code import judge_worker
from fcsd.eval.code.judge import Outcome, Verdict, score
from fcsd.eval.code.problems import Case, Problem
from fcsd.eval.code.sandbox import Sandbox
from fcsd.eval.code.sandbox_runner import encode

NAME = "similar_elements"  # EvalPlus compares its outputs as sets
GOOD = f"def {NAME}(x):\n    return [x]"
# Writes a reply of its own into every open pipe, as a hostile program can.
REPLY = """\
import os
def similar_elements(x):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'{"index":0,"value":' + %s + b'}\\n')
        except OSError:
            pass
    os._exit(0)
    return x  # EvalPlus' sanitizer drops functions that return nothing
"""
ANSWERS = {
    "decorators without end": "@a\n" * 1000,
    "keys of one hash": f"def {NAME}(x):\n    return [n * {2**61 - 1} for n in range(200_000)]",
    "a set of one hash": REPLY
    % f"b'{{\"set\":[0' + b''.join(b',{{\"int\":\"%x\"}}' % (n * {2**61 - 1}) for n in range(200_000)) + b']}}'",
    "good": GOOD,
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Outcome]:
    problems = [Problem(name, NAME, [Case([1], [1])], [], dataset="mbpp") for name in ANSWERS]
    found = score(problems, list(ANSWERS.values()), workers=2, timeout_s=1, form="chat")
    return {verdict.task_id: verdict.base for verdict in found}


def test_a_good_answer_passes_beside_hostile_ones(verdicts: dict[str, Outcome]):
    assert verdicts["good"] == Outcome("pass")


@pytest.mark.parametrize("name", ["decorators without end", "keys of one hash", "a set of one hash"])
def test_an_answer_that_takes_too_long_to_read_fails(verdicts: dict[str, Outcome], name: str):
    detail = "its answer or results took more than 2 s of CPU to be read and compared"
    assert verdicts[name] == Outcome("fail", detail)


def test_a_result_that_takes_too_much_memory_to_read_fails():
    """30 MB of empty lists would take more than a gigabyte; the limit on time is too high to end this."""
    problems = [Problem(name, NAME, [Case([1], [1])], []) for name in ("lists", "good")]
    lists, good = score(problems, [REPLY % "b'[' + b'[],' * 10_000_000 + b'[]]'", GOOD], workers=2, timeout_s=60)
    assert lists.base == Outcome("fail", "case 0: cannot be compared (MemoryError)")
    assert good.base == Outcome("pass")


PROBLEM = Problem("x/1", "f", [Case([1], 1)], [Case([2], 2)])
SANDBOX = Sandbox("bwrap", (), drops_root=False)


def verdict_of_child(code: int, written: bytes = b"") -> Verdict:
    return judge_worker.verdict_of(code, written, PROBLEM, SANDBOX, 10)


def test_a_judging_child_that_crashes_fails_its_answer_and_one_that_is_killed_does_not():
    crashed = verdict_of_child(-signal.SIGSEGV)
    assert crashed.base == crashed.plus and crashed.base.status == "fail"
    killed = verdict_of_child(-signal.SIGKILL)
    assert killed.base == killed.plus == Outcome("error", "the judging process was killed 2 times")
    broken = verdict_of_child(1, b"Traceback\nKeyError: 'x'")
    assert broken.base == Outcome("error", "the judging process failed: KeyError: 'x'")


def test_a_child_that_is_killed_once_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The kernel's out-of-memory killer may choose the child."""
    marker = tmp_path / "killed"

    def judge_answer(problem: Problem, *_: object) -> Verdict:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Verdict(problem.task_id, Outcome("pass"), None, "bwrap")

    monkeypatch.setattr(judge_worker, "judge_answer", judge_answer)
    monkeypatch.setattr(judge_worker, "find_sandbox", lambda **_: SANDBOX)
    settings = {"workers": 1, "timeout_s": 1, "form": "program"}
    problems = [encode(asdict(PROBLEM))]
    job = {"accept_unsafe_exec": False, "problems": problems, "generations": ["program"], "settings": settings}
    assert judge_worker.judge_all(job) == [Verdict("x/1", Outcome("pass"), None, "bwrap")]
    assert marker.exists()
