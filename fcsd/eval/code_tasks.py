"""Runs HumanEval+ and MBPP+ with lm-eval's prompts, examples and tests, and runs generated programs in the sandbox.

lm-eval would execute generated programs in a fork of this process. Its executor is replaced by one that executes
nothing. The programs and their tests are passed to ``fcsd.eval.code.judge`` instead.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fcsd.errors import FcsdError
from fcsd.eval.code.judge import Form, Verdict, pass_at_1, score
from fcsd.eval.code.problems import Problem, problem_from_tests

# CPU seconds that a program may take. lm-eval allows three seconds of wall time, so a busy machine lowers its scores.
TIMEOUT_S = 10


class _NoExecution:
    """Takes the place of lm-eval's ``code_eval`` metric."""

    def compute(self, references: Any, predictions: Any, k: Any) -> tuple[dict[str, float], None]:
        """Return NaN without executing anything. If this value ever reached a result, it would be noticed."""
        return {"pass@1": math.nan}, None


@contextlib.contextmanager
def no_execution() -> Iterator[None]:
    """A context in which lm-eval's code tasks can be loaded; without it they fetch their executor from the hub."""
    import evaluate

    load = evaluate.load
    evaluate.load = lambda path, *args, **kwargs: _NoExecution() if path == "code_eval" else load(path, *args, **kwargs)
    try:
        yield
    finally:
        evaluate.load = load


def run_programs(samples: Sequence[dict[str, Any]], accept_unsafe_exec: bool) -> tuple[list[float], str]:
    """Run the programs that a model wrote against the tests of lm-eval's samples, in the sandbox.

    Returns:
        1.0 or 0.0 per sample, and the level of the sandbox.

    Raises:
        BadInputError: tests of an unknown shape, which cannot be run without showing the program its answers.
        FcsdError: there is no sandbox, or a program has no verdict.
    """
    problems = [problem_from_tests(str(s["doc"]["task_id"]), s["target"]) for s in samples]
    verdicts, level = judged(problems, [_program(sample) for sample in samples], accept_unsafe_exec)
    return [float(verdict.base.status == "pass") for verdict in verdicts], level


def judged(
    problems: Sequence[Problem], programs: Sequence[str], accept_unsafe_exec: bool, form: Form = "program"
) -> tuple[list[Verdict], str]:
    """The verdicts on all programs of a task, and the level of the sandbox.

    Raises:
        FcsdError: there is no sandbox, or a program has no verdict.
    """
    verdicts = score(problems, programs, timeout_s=TIMEOUT_S, form=form, accept_unsafe_exec=accept_unsafe_exec)
    pass_at_1(verdicts, "base")  # raises where a verdict is missing
    levels = {verdict.sandbox for verdict in verdicts}
    if len(levels) != 1:
        raise FcsdError(f"programs of one task ran in different sandboxes: {', '.join(sorted(levels))}")
    return verdicts, levels.pop()


def _program(sample: dict[str, Any]) -> str:
    """The program as lm-eval's own filter composes it: HumanEval's prompt and the completion."""
    program = sample["filtered_resps"][0]
    return program[0] if isinstance(program, list) else program
