"""Code benchmarks: generated programs in, verdicts out.

`score` hands problems and programs to a fresh process (`fcsd.eval.code.scorer`), never a fork of the caller, which
may hold CUDA and NCCL; that process runs every program in a sandbox and compares outside of it. Expected
values never enter the sandbox: a program sees its own code and the inputs, and what it prints, exits with or
overwrites decides nothing.

A program may use `timeout_s` seconds of CPU, or four times what the reference needed where that is more. CPU
time, not wall time, so a busy machine fails nobody; wall time is bounded at three times that plus five.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fcsd.errors import FcsdError
from fcsd.eval.code.oracles import Case
from fcsd.eval.code.sandbox_runner import encode
from fcsd.eval.code.scorer_process import ask_scorer

Status = Literal["pass", "fail", "timeout", "error"]
Form = Literal["program", "completion", "chat"]


@dataclass(frozen=True)
class Problem:
    """One task. `fcsd.eval.code.problems` makes these from EvalPlus and lm-eval rows.

    Attributes:
        entry_point: function called with each case's arguments; None where cases are expressions.
        base, plus: the original tests and EvalPlus' additional ones.
        prefix: code that a raw completion continues (HumanEval's prompt).
        suffix: code run after the program (imports that expressions need).
        reference: program whose outputs are the expected ones; None where the cases hold them.
    """

    task_id: str
    entry_point: str | None
    base: list[Case]
    plus: list[Case]
    prefix: str = ""
    suffix: str = ""
    reference: str | None = None


@dataclass(frozen=True)
class Outcome:
    """`error`: no verdict was reached (worker killed, reference fails); it says nothing about the code."""

    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """`plus` is EvalPlus' plus: base and plus inputs both right; None where there are no plus inputs."""

    task_id: str
    base: Outcome
    plus: Outcome | None
    sandbox: str


def score(
    problems: Sequence[Problem],
    generations: Sequence[str],
    *,
    workers: int | None = None,
    timeout_s: int = 10,
    form: Form = "program",
    accept_unsafe_exec: bool = False,
    budget_s: float | None = None,
) -> list[Verdict]:
    """Judge one generation per problem.

    Args:
        workers: programs run at once; default one per CPU this process may use.
        timeout_s: CPU seconds per program.
        form: what a generation is: `program` (runs as it is), `completion` (continues the problem's prefix),
            `chat` (an answer in prose and markdown; EvalPlus' sanitizer finds the code).
        budget_s: wall seconds for everything; default twice the wall limits of all programs, one round of
                `workers` after another, plus a minute.

    Raises:
        FcsdError: no sandbox; scoring died, fell silent or ran out of `budget_s`, twice. Never a partial score.
    """
    if len(problems) != len(generations):
        raise ValueError(f"{len(problems)} problems but {len(generations)} generations")
    workers = workers or len(os.sched_getaffinity(0))
    if budget_s is None:
        rounds = -(-len(problems) // workers)
        budget_s = 60 + rounds * 2 * wall_limit(timeout_s)
    job = {
        "problems": [encode(asdict(problem)) for problem in problems],
        "generations": list(generations),
        "settings": {"workers": workers, "timeout_s": timeout_s, "form": form},
        "accept_unsafe_exec": accept_unsafe_exec,
        "budget_s": budget_s,
    }
    reply = ask_scorer(job, budget_s)
    if "error" in reply:
        raise FcsdError(reply["error"], hint=reply["hint"])
    return [_verdict(row) for row in reply["verdicts"]]


def pass_at_1(verdicts: Sequence[Verdict], tests: Literal["base", "plus"]) -> float:
    """Share of problems passed.

    Raises:
        FcsdError: a verdict is missing or an error, so that there is no honest number.
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


def wall_limit(cpu_s: float) -> float:
    """Wall seconds a program with `cpu_s` seconds of CPU may take."""
    return 3 * cpu_s + 5


def problem_from(fields: dict[str, Any]) -> Problem:
    """Undo `asdict`."""
    cases = {tests: [Case(**case) for case in fields[tests]] for tests in ("base", "plus")}
    return Problem(**{**fields, **cases})


def _verdict(row: dict[str, Any]) -> Verdict:
    plus = row["plus"] and Outcome(**row["plus"])
    return Verdict(row["task_id"], Outcome(**row["base"]), plus, row["sandbox"])
