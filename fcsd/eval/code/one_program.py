"""Judges one program: extracts it, runs the reference and the program in the sandbox, and compares their outputs.

Everything that is read here from an answer or from a program is untrusted. `judge_answer` therefore runs in a process
of its own and limits that process before it reads any of it.
"""

import json
import os
import reprlib
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from fcsd.errors import FcsdError
from fcsd.eval.code.comparison import RULES, Case
from fcsd.eval.code.extraction import sanitize
from fcsd.eval.code.judge import READING_SHARE, Outcome, Problem, Verdict, wall_limit
from fcsd.eval.code.sandbox import Exit, Limits, Sandbox, run
from fcsd.eval.code.sandbox_runner import decode, encode

REFERENCE_SHARE = 6  # the reference may use this many times `timeout_s`
REFERENCE_FACTOR = 4  # a program may use this many times what the reference used
READING_BYTES = 1 << 30  # address space for extraction and comparison, beyond what the process has already

T = TypeVar("T")


def judge_answer(problem: Problem, generation: str, sandbox: Sandbox, timeout_s: int, form: str) -> Verdict:
    """The verdict on one answer. The call sets lasting limits on the CPU time and the memory of this process.

    If extraction and comparison need too much time, the kernel ends the process by SIGXCPU.
    """
    cases = [*problem.base, *problem.plus]
    with tempfile.TemporaryFile() as expected:
        try:
            if not problem.base:
                raise FcsdError("the problem has no base tests")
            cpu_s = timeout_s
            if problem.reference is None:
                expected.writelines(_reply(index, case.expected) for index, case in enumerate(cases))
            else:
                used_s = _run_reference(problem, sandbox, REFERENCE_SHARE * timeout_s, expected)
                cpu_s = max(timeout_s, round(REFERENCE_FACTOR * used_s))
            _limit_this_process(READING_SHARE * timeout_s)
            program = sanitize(generation, problem.entry_point) if form == "chat" else generation
            results, ended = _twice(lambda: _run_program(problem, program, sandbox, cpu_s, expected))
            if ended.kind == "lost":
                raise FcsdError(ended.detail)
        except FcsdError as error:
            return uniform_verdict(problem, Outcome("error", str(error)), sandbox)
        except MemoryError:
            detail = f"its answer or results need more than {READING_BYTES >> 30} GiB of memory to be read"
            return uniform_verdict(problem, Outcome("fail", detail), sandbox)
    base = _outcome(results[: len(problem.base)], ended, len(problem.base))
    plus = _outcome(results, ended, len(cases)) if problem.plus else None
    return Verdict(problem.task_id, base, plus, sandbox.level)


def uniform_verdict(problem: Problem, outcome: Outcome, sandbox: Sandbox) -> Verdict:
    """A verdict with the same outcome for the base and the plus tests."""
    return Verdict(problem.task_id, outcome, outcome if problem.plus else None, sandbox.level)


def _limit_this_process(cpu_s: int) -> None:
    """Allow this process `cpu_s` more seconds of CPU time and `READING_BYTES` more of address space.

    Only the soft limits are set: a sandbox that is started later sets limits of its own, which may be higher.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + cpu_s,
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + READING_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (soft, hard))


def _twice(attempt: Callable[[], tuple[T, Exit]]) -> tuple[T, Exit]:
    """Repeat a run once if it was lost, which is no fault of the program."""
    result, ended = attempt()
    return attempt() if ended.kind == "lost" else (result, ended)


def _run_reference(problem: Problem, sandbox: Sandbox, cpu_s: int, expected: IO[bytes]) -> float:
    """Write the reference's replies to `expected`, one line per case. Returns the CPU seconds that it used.

    Raises:
        FcsdError: the reference itself did not answer every case.
    """

    def attempt() -> tuple[list[bytes], Exit]:
        last = [b""]
        expected.seek(0)
        expected.truncate()

        def receive(line: bytes) -> bool:
            last[0] = line
            if b'"value":' in line[:40]:
                expected.write(line + b"\n")
            return line.startswith((b'{"index":', b'{"done":')) and b'"raised":' not in line[:40]

        return last, _run(problem, problem.reference or "", sandbox, cpu_s, receive)

    (last,), ended = _twice(attempt)
    if ended.kind != "done":
        reason = ended.detail or last[:200].decode(errors="replace")
        raise FcsdError(f"the reference solution fails: {reason}")
    return json.loads(last)["done"]


def _run_program(
    problem: Problem, program: str, sandbox: Sandbox, cpu_s: int, expected: IO[bytes]
) -> tuple[list[Outcome], Exit]:
    """The outcomes of the cases up to the first that is not right, and how the run ended."""
    cases = [*problem.base, *problem.plus]
    results: list[Outcome] = []
    expected.seek(0)

    def receive(line: bytes) -> bool:
        if len(results) < len(cases) and not line.startswith(b'{"done":'):
            index = len(results)
            results.append(_compare(line, expected.readline()[:-1], index, cases[index]))
        return not results or results[-1].status == "pass"

    return results, _run(problem, program, sandbox, cpu_s, receive)


def _run(problem: Problem, code: str, sandbox: Sandbox, cpu_s: int, receive: Callable[[bytes], bool]) -> Exit:
    cases = [*problem.base, *problem.plus]
    return run(
        sandbox,
        f"{code}\n{problem.suffix}",
        [case.call if problem.entry_point is None else encode(case.call) for case in cases],
        receive,
        entry_point=problem.entry_point,
        limits=Limits(cpu_s=cpu_s, wall_s=wall_limit(cpu_s)),
        not_none=any(case.rule == "not_none" for case in cases),
    )


def _compare(line: bytes, expected_line: bytes, index: int, case: Case) -> Outcome:
    """Judge one reply. `line` is untrusted: every exception that it causes is the program's fault."""
    if line == expected_line and case.rule in ("evalplus", "exact", "not_none"):
        return Outcome("pass")
    expected = decode(json.loads(expected_line)["value"])
    try:
        reply = json.loads(line)
        if "value" not in reply:
            return Outcome("fail", str(reply.get("raised") or reply["load"])[:200])
        out = decode(reply["value"])
        if reply["index"] == index and RULES[case.rule](case.call, out, expected, case):
            return Outcome("pass")
        return Outcome("fail", f"case {index}: got {_show(out)}, expected {_show(expected)}")
    except Exception as error:
        return Outcome("fail", f"case {index}: cannot be compared ({type(error).__name__})")


def _outcome(results: list[Outcome], ended: Exit, cases: int) -> Outcome:
    if results and results[-1].status != "pass":
        return results[-1]
    if len(results) == cases:
        return Outcome("pass")
    status = "timeout" if ended.kind == "timeout" else "fail"
    return Outcome(status, ended.detail or f"only {len(results)} of {cases} results")


def _reply(index: int, value: Any) -> bytes:
    """The line that an honest runner sends for `value`."""
    return json.dumps({"index": index, "value": encode(value)}, separators=(",", ":")).encode() + b"\n"


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an int too long to print
        return f"a huge {type(value).__name__}"
