"""The process that scores: reads a job on stdin, runs the programs in sandboxes, writes verdicts on stdout.

Started by `fcsd.eval.code.scorer_process`; imports neither torch nor transformers. Outputs of untrusted programs are
parsed here, one value at a time, so that the caller (a training process) never touches them.
"""

import json
import reprlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import IO, Any, TypeVar

from fcsd.errors import FcsdError
from fcsd.eval.code.extract import program_text
from fcsd.eval.code.judge import Outcome, Problem, Verdict, problem_from, wall_limit
from fcsd.eval.code.oracles import ORACLES, Case
from fcsd.eval.code.sandbox import Exit, Limits, Sandbox, find_sandbox, run
from fcsd.eval.code.sandbox_runner import decode, encode
from fcsd.eval.code.scorer_process import BEAT_S

REFERENCE_SHARE = 6  # the reference may use this many times `timeout_s`
REFERENCE_FACTOR = 4  # and a program this many times what the reference used

T = TypeVar("T")


def main() -> None:
    done = threading.Event()
    pulse = threading.Thread(target=_beat, args=(done,), daemon=True)
    pulse.start()
    job = json.load(sys.stdin)
    signal.alarm(int(job["budget_s"]) + 1)  # nobody waits longer, even if the caller is gone
    try:
        verdicts = score_here(job)
        reply: dict[str, Any] = {"verdicts": [asdict(verdict) for verdict in verdicts]}
    except FcsdError as error:
        reply = {"error": str(error), "hint": error.hint}
    done.set()
    pulse.join()
    json.dump(reply, sys.stdout)


def _beat(done: threading.Event) -> None:
    """Tell whoever waits that this process is alive."""
    while not done.wait(BEAT_S):
        print(flush=True)


def score_here(job: dict[str, Any]) -> list[Verdict]:
    sandbox = find_sandbox(accept_unsafe_exec=job["accept_unsafe_exec"])
    problems = [problem_from(decode(fields)) for fields in job["problems"]]
    settings = job["settings"]

    def one(problem: Problem, generation: str) -> Verdict:
        program = program_text(problem, generation, settings["form"])
        return judge(problem, program, sandbox, settings["timeout_s"])

    with ThreadPoolExecutor(settings["workers"]) as pool:
        return list(pool.map(one, problems, job["generations"]))


def judge(problem: Problem, program: str, sandbox: Sandbox, timeout_s: int) -> Verdict:
    """Verdict on one program."""
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
            results, ended = _twice(lambda: _run_program(problem, program, sandbox, cpu_s, expected))
            if ended.kind == "lost":
                raise FcsdError(ended.detail)
        except FcsdError as error:
            outcome = Outcome("error", str(error))
            return Verdict(problem.task_id, outcome, outcome if problem.plus else None, sandbox.level)
    base = _outcome(results[: len(problem.base)], ended, len(problem.base))
    plus = _outcome(results, ended, len(cases)) if problem.plus else None
    return Verdict(problem.task_id, base, plus, sandbox.level)


def _twice(attempt: Callable[[], tuple[T, Exit]]) -> tuple[T, Exit]:
    """Repeat a run that was lost to no fault of the program, once."""
    result, ended = attempt()
    return attempt() if ended.kind == "lost" else (result, ended)


def _run_reference(problem: Problem, sandbox: Sandbox, cpu_s: int, expected: IO[bytes]) -> float:
    """Write the reference's replies to `expected`, one line per case; CPU seconds it used.

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
    """Outcomes of the cases up to the first that is not right, and how the run ended."""
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
        not_none=any(case.oracle == "not_none" for case in cases),
    )


def _compare(line: bytes, expected_line: bytes, index: int, case: Case) -> Outcome:
    """Judge one reply. `line` is untrusted: whatever goes wrong with it is the program's fault."""
    if line == expected_line and case.oracle in ("evalplus", "exact", "not_none"):
        return Outcome("pass")
    expected = decode(json.loads(expected_line)["value"])
    try:
        reply = json.loads(line)
        if "value" not in reply:
            return Outcome("fail", str(reply.get("raised") or reply["load"])[:200])
        out = decode(reply["value"])
        if reply["index"] == index and ORACLES[case.oracle](case.call, out, expected, case):
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
    """The line an honest runner sends for `value`."""
    return json.dumps({"index": index, "value": encode(value)}, separators=(",", ":")).encode() + b"\n"


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an int too long to print
        return f"a huge {type(value).__name__}"


if __name__ == "__main__":
    main()
