"""The judging process: it reads a job on stdin, judges every answer in a child process, and writes verdicts on stdout.

`fcsd.eval.code.judge` starts it. It imports neither torch nor transformers, and it has a single thread, so that it may
fork. A child extracts the program from one answer, runs it in the sandbox and lets EvalPlus compare its outputs.
Everything that a child reads from an answer or from a program is untrusted, so it limits itself first; whatever an
answer does to its child, the other answers are judged all the same.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import reprlib
import resource
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fcsd.errors import FcsdError
from fcsd.eval.code.extraction import sanitize
from fcsd.eval.code.judge import ATTEMPTS, BEAT_S, READING_SHARE, Outcome, Verdict, verdict_from, wall_limit
from fcsd.eval.code.problems import Case, Problem
from fcsd.eval.code.sandbox import Exit, Limits, Sandbox, find_sandbox, run, whole
from fcsd.eval.code.sandbox_runner import decode, encode

REFERENCE_SHARE = 6  # the reference may use this many times `timeout_s`
REFERENCE_FACTOR = 4  # a program may use this many times what the reference used
READING_BYTES = 1 << 30  # address space for extraction and comparison, beyond what the process has already
NO_LIMIT_S = 1e6  # for EvalPlus' own limit on a call: what it calls here only reads, under the limits of its process


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
    """One verdict per answer, in order. An answer without a verdict is judged once more.

    Raises:
        FcsdError: there is no sandbox.
    """
    sandbox = find_sandbox(accept_unsafe_exec=job["accept_unsafe_exec"])
    problems = [_problem_from(decode(fields)) for fields in job["problems"]]
    workers, timeout_s, form = (job["settings"][name] for name in ("workers", "timeout_s", "form"))
    # Imported once here instead of in every child.
    for name in ("evalplus.eval", *(["evalplus.sanitize"] if form == "chat" else [])):
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    verdicts: dict[int, Verdict] = {}
    attempts = [0] * len(problems)
    waiting = list(reversed(range(len(problems))))
    running: dict[Any, tuple[int, Any]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.pop()
            attempts[index] += 1
            output, input_ = fork.Pipe(duplex=False)
            arguments = (problems[index], job["generations"][index], sandbox, timeout_s, form)
            child = fork.Process(target=_child, args=(input_, os.getpid(), lambda a=arguments: judge_answer(*a)))
            child.start()
            input_.close()
            running[output] = index, child
        ready: list[Any] = multiprocessing.connection.wait(list(running))
        for output in ready:
            index, child = running.pop(output)
            with contextlib.closing(output):
                try:
                    written = output.recv_bytes()
                except EOFError:
                    written = b""
            child.join()
            verdict = verdict_of(child.exitcode, written, problems[index], sandbox, timeout_s)
            if verdict.base.status == "error" and attempts[index] < ATTEMPTS:
                waiting.append(index)
            else:
                verdicts[index] = verdict
    return [verdicts[index] for index in range(len(problems))]


def _problem_from(fields: dict[str, Any]) -> Problem:
    """The problem of which `dataclasses.asdict` made `fields`."""
    cases: dict[str, Any] = {tests: [Case(**case) for case in fields[tests]] for tests in ("base", "plus")}
    return Problem(**fields | cases)


def _child(output: Any, parent: int, judged: Callable[[], Verdict]) -> None:
    """Send a verdict, or the traceback of an exception, and end this process."""
    gc.disable()  # results hold no cycles, and collecting garbage takes longer than reading millions of items
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives the judging process
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the heartbeat is the parent's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the caller waits until stdout closes
        written = json.dumps(asdict(judged())).encode()
        status = 0
    except BaseException:
        written = traceback.format_exc().encode()
    output.send_bytes(written)
    os._exit(status)


def verdict_of(code: int, written: bytes, problem: Problem, sandbox: Sandbox, timeout_s: int) -> Verdict:
    """The verdict of a child that ended with exit status `code`, or was ended by the signal `-code`."""
    if code == 0:
        return verdict_from(json.loads(written))
    if code > 0:
        lines = written.decode(errors="replace").strip().splitlines()
        outcome = Outcome("error", f"the judging process failed: {lines[-1] if lines else code}")
    elif code == -signal.SIGKILL:
        outcome = Outcome("error", f"the judging process was killed {ATTEMPTS} times")
    elif code == -signal.SIGXCPU:
        detail = f"its answer or results took more than {READING_SHARE * timeout_s} s of CPU to be read and compared"
        outcome = Outcome("fail", detail)
    else:
        outcome = Outcome("fail", f"its answer or results ended the process that read them (signal {-code})")
    return _uniform(problem, outcome, sandbox)


def judge_answer(problem: Problem, generation: str, sandbox: Sandbox, timeout_s: int, form: str) -> Verdict:
    """The verdict on one answer. The call sets lasting limits on the CPU time and the memory of this process.

    If extraction and comparison need too much time, the kernel ends the process by SIGXCPU.
    """
    cpu_s, cases = timeout_s, [*problem.base, *problem.plus]
    with tempfile.TemporaryFile() as outputs:  # of the reference
        try:
            if not problem.base:
                raise FcsdError("the problem has no base tests")
            if problem.reference is not None:
                used_s = _run_reference(problem, sandbox, REFERENCE_SHARE * timeout_s, outputs)
                cpu_s = max(timeout_s, round(REFERENCE_FACTOR * used_s))
            _limit_this_process(READING_SHARE * timeout_s)
            expected = (reply_of(index, case.expected) for index, case in enumerate(cases))
            if problem.reference is not None:
                expected = (line.rstrip(b"\n") for line in outputs)
            program = sanitize(generation, problem.entry_point) if form == "chat" else generation
            passed, fault, ended = compare(problem, _run(problem, program, sandbox, cpu_s), expected)
        except FcsdError as error:
            return _uniform(problem, Outcome("error", str(error)), sandbox)
        except MemoryError:
            detail = f"its answer or results need more than {READING_BYTES >> 30} GiB of memory to be read"
            return _uniform(problem, Outcome("fail", detail), sandbox)
    if ended is not None and ended.kind == "lost":
        return _uniform(problem, Outcome("error", ended.detail), sandbox)
    if fault is None and ended is not None:
        missing = ended.detail or f"only {passed} of {len(cases)} results"
        fault = Outcome("timeout" if ended.kind == "timeout" else "fail", missing)
    base = Outcome("pass") if fault is None or passed >= len(problem.base) else fault
    plus = fault or Outcome("pass")
    return Verdict(problem.task_id, base, plus if problem.plus else None, sandbox.level)


def compare(
    problem: Problem, replies: Generator[bytes, None, Exit], expected: Iterator[bytes]
) -> tuple[int, Outcome | None, Exit | None]:
    """Compare the outputs of a program with the expected ones, up to the first that is not right.

    EvalPlus' checker calls a function that returns the next output, as it would call the program.

    Returns:
        How many cases passed, what is wrong with the next one, and how the run ended where that is the reason.
    """
    cases = [*problem.base, *problem.plus]
    right: dict[int, Any] = {}  # the expected value of the case at hand
    value: Any = None
    fault: Outcome | None = None
    ended: Exit | None = None
    asked = 0

    def output(*_: Any) -> Any:
        """The next output of the program. Every exception that it causes is the program's fault."""
        nonlocal value, fault, ended, asked
        index, asked = asked, asked + 1
        right.clear()
        wanted = next(expected)
        right[index] = value = decode(json.loads(wanted)["value"])
        try:
            line = next(replies)
        except StopIteration as end:
            ended = end.value
            raise
        if line == wanted:
            if value != value:  # NaN is right where the reference returns it; inside of a list it is the same object
                right[index] = value = 0.0
            return value
        try:
            reply = json.loads(line)
            if "value" not in reply:
                fault = Outcome("fail", str(reply.get("raised") or reply["load"])[:200])
                raise ValueError
            if reply["index"] != index:
                raise ValueError
            value = decode(reply["value"])
        except Exception as error:
            fault = fault or Outcome("fail", f"case {index}: cannot be compared ({type(error).__name__})")
            raise
        return value

    with contextlib.closing(replies):
        if problem.entry_point is None:
            is_right = all(_holds(case, output, right) for case in cases)
        else:
            is_right = _checked_by_evalplus(problem.dataset, problem.entry_point, cases, output, right)
    if is_right:
        return asked, None, None
    if fault is None and ended is None:
        shown, wanted = (_show(each) for each in (value, right[asked - 1]))
        fault = Outcome("fail", f"case {asked - 1}: got {shown}, expected {wanted}")
    return asked - 1, fault, ended


def _checked_by_evalplus(
    dataset: str, entry_point: str, cases: list[Case], output: Callable[..., Any], right: dict[int, Any]
) -> bool:
    """Whether EvalPlus' checker passes all cases of a problem, if `output` stands in the place of the program."""
    checker: Any = importlib.import_module("evalplus.eval")
    # This process is limited already, and runs no program that would need these.
    checker.create_tempdir = contextlib.nullcontext
    checker.reliability_guard = lambda **_: None
    # The checker executes a text, and looks the entry point up by its name, which never becomes a part of the text.
    program: Any = types.ModuleType("outputs_of_program")
    program.__all__ = [entry_point]
    setattr(program, entry_point, output)
    sys.modules[program.__name__] = program
    code = f"from {program.__name__} import *"
    inputs, limits = [case.call for case in cases], [NO_LIMIT_S] * len(cases)
    state, progress = types.SimpleNamespace(value=None), types.SimpleNamespace(value=0)
    details = [False] * len(cases)
    checker.unsafe_execute(
        dataset, entry_point, code, inputs, right, limits, cases[0].atol, True, state, details, progress
    )
    return state.value == checker._SUCCESS  # `details` lack the cases of HumanEval/32


def _holds(case: Case, output: Callable[[], Any], right: dict[int, Any]) -> bool:
    """Whether an assertion of lm-eval's tests holds. EvalPlus' checker would judge it with a tolerance of its own."""
    try:
        value, (expected,) = output(), right.values()
        if case.rtol is None:
            return bool(value == expected)
        return math.isclose(value, expected, rel_tol=case.rtol, abs_tol=case.atol)
    except Exception:
        return False


def _uniform(problem: Problem, outcome: Outcome, sandbox: Sandbox) -> Verdict:
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


def _run_reference(problem: Problem, sandbox: Sandbox, cpu_s: int, outputs: IO[bytes]) -> float:
    """Write the reference's replies to `outputs`, one line per case. Returns the CPU seconds that it used.

    Raises:
        FcsdError: the reference itself did not answer every case.
    """
    ended = whole(_run(problem, problem.reference or "", sandbox, cpu_s), lambda line: outputs.write(line + b"\n"))
    outputs.seek(0)
    last = b""
    for count, last in enumerate(outputs):
        if b'"value":' not in last[:40] and not (last.startswith(b'{"done":') and count):
            raise FcsdError(f"the reference solution fails: {last[:200].decode(errors='replace').strip()}")
    if ended.kind != "done":
        raise FcsdError(f"the reference solution fails: {ended.detail}")
    outputs.seek(0)
    return json.loads(last)["done"]


def _run(problem: Problem, code: str, sandbox: Sandbox, cpu_s: int) -> Generator[bytes, None, Exit]:
    cases = [*problem.base, *problem.plus]
    return run(
        sandbox,
        f"{code}\n{problem.suffix}",
        [case.call if problem.entry_point is None else encode(case.call) for case in cases],
        entry_point=problem.entry_point,
        limits=Limits(cpu_s=cpu_s, wall_s=wall_limit(cpu_s)),
        not_none=problem.not_none,
    )


def reply_of(index: int, value: Any) -> bytes:
    """The line that an honest runner sends for `value`."""
    return json.dumps({"index": index, "value": encode(value)}, separators=(",", ":")).encode()


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an int too long to print
        return f"a huge {type(value).__name__}"


if __name__ == "__main__":
    main()
