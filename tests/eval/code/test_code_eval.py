"""Right programs pass, wrong ones fail, and nothing that is not a verdict becomes a score."""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from code_problems import PROBLEMS
from evalplus.eval._special_oracle import MBPP_OUTPUT_SET_EQ_TASKS

from fcsd.errors import BadInputError, FcsdError
from fcsd.eval.code.judge import Outcome, Verdict, pass_at_1, score
from fcsd.eval.code.problems import Case, Problem, evalplus_problem, load_evalplus, problem_from_tests
from fcsd.eval.code.sandbox import find_sandbox, sandboxes

ROWS = {row["task_id"]: row for row in PROBLEMS}
CHECK = """
import numpy as np

def is_floats(x):
    return isinstance(x, float)

def assertion(out, exp, atol):
    assert out == exp

{reference}
def check(candidate):
    inputs = {inputs}
    {results}
    for i, {target} in enumerate({source}):
        {assertion}

check({entry_point})"""


def statuses(verdicts: list[Verdict]) -> dict[str, tuple[str, str | None]]:
    return {v.task_id: (v.base.status, v.plus.status if v.plus else None) for v in verdicts}


def passed(verdicts: list[Verdict]) -> None:
    """Every verdict is a pass, or the message names those that are not."""
    assert {
        v.task_id: (v.base, v.plus) for v in verdicts if {v.base.status, v.plus and v.plus.status} - {"pass", None}
    } == {}


def test_problems_cover_every_rule_of_evalplus():
    problems = [evalplus_problem(row) for row in PROBLEMS]
    names = {problem.entry_point for problem in problems}
    assert names >= {"find_zero", "are_equivalent", "sum_div", "surface_Area", "digit_distance_nums"}
    assert names & set(MBPP_OUTPUT_SET_EQ_TASKS) and any(problem.not_none for problem in problems)
    assert any(problem.base[0].atol for problem in problems) and len(problems) >= 30


def test_canonical_solutions_pass_and_wrong_ones_fail():
    problems = [evalplus_problem(row) for row in PROBLEMS]
    right = score(problems, [row["prompt"] + row["canonical_solution"] for row in PROBLEMS])
    passed(right)
    assert pass_at_1(right, "base") == pass_at_1(right, "plus") == 1.0
    assert {verdict.sandbox for verdict in right} == {"bwrap"}

    wrong = score(problems, [row["prompt"] + row["wrong"] for row in PROBLEMS])
    assert [v.task_id for v in wrong if v.plus is None or v.plus.status != "fail"] == []
    assert pass_at_1(wrong, "plus") == 0.0


def test_given_data_passes(data_dir: Path | None, tmp_path: Path):
    """With `--data DIR`, the real sets (EvalPlus' .jsonl or .jsonl.gz); otherwise the self-written one."""
    if data_dir is None:
        (tmp_path / "problems.jsonl").write_text("\n".join(json.dumps(row) for row in PROBLEMS[:3]))
    files = sorted((data_dir or tmp_path).glob("*.jsonl*"))
    assert files, f"no .jsonl or .jsonl.gz in {data_dir}"
    for file in files:
        problems = load_evalplus(file)
        passed(score(problems, [problem.reference or "" for problem in problems]))


BROKEN = {
    "nothing": b"",
    "cut off": json.dumps(PROBLEMS[0]).encode()[:-3],
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "a number": b"5",
    "a list": b"[]",
    "no solution": json.dumps({k: v for k, v in PROBLEMS[0].items() if k != "canonical_solution"}).encode(),
    **{
        f"{key} {value!r}": json.dumps(PROBLEMS[0] | {key: value}).encode()
        for key, value in [("task_id", 3), ("prompt", None), ("atol", math.nan), ("atol", "1"), ("base_input", 3)]
    },
    "inputs": json.dumps(PROBLEMS[0] | {"plus_input": [1]}).encode(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_of_problems_is_refused_in_one_line(name: str, tmp_path: Path):
    (tmp_path / "problems.jsonl").write_bytes(BROKEN[name])
    with pytest.raises(BadInputError, match=r"problems\.jsonl") as caught:
        load_evalplus(tmp_path / "problems.jsonl")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_fifo_in_the_place_of_problems_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "problems.jsonl")
    with pytest.raises(BadInputError, match="not a regular file"):
        load_evalplus(tmp_path / "problems.jsonl")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_flake_in_twenty_runs_on_an_overloaded_machine():
    problems = [evalplus_problem(row) for row in PROBLEMS]
    spin = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(20):
            passed(score(problems, [problem.reference or "" for problem in problems]))
    finally:
        for process in spin:
            process.kill()
            process.wait()


def test_another_right_answer_passes_where_the_rule_allows_it():
    answers = {
        "HumanEval/32": "def find_zero(xs):\n    return {1: -0.5, -6: 3, -2: 2 ** (1 / 3)}[xs[0]]",
        "Mbpp/2": "def similar_elements(a, b):\n    return sorted(set(a) & set(b), reverse=True)",
        "Mbpp/7": "def find_char_long(text):\n    return {w for w in text.split() if len(w) > 3}",
        "Mbpp/295": "def sum_div(n):\n    return 0",
        "Mbpp/581": "def surface_Area(b, h):\n    return round(b * b + b * (b * b + 4 * h * h) ** 0.5)",
        "Mbpp/558": "def digit_distance_nums(a, b):\n    n = max(len(str(a)), len(str(b)))\n"
        "    return sum(abs(int(x) - int(y)) for x, y in zip(str(a).zfill(n), str(b).zfill(n)))",
        "Mbpp/16": "def text_match_three(text):\n    return 'abbb' in text",
        "HumanEval/1030": "def third(x):\n    return x / 3 + 1e-8",
        "HumanEval/1011": "def frozen(xs):\n    return set(xs)",
    }  # fmt: skip
    problems = [evalplus_problem(ROWS[task]) for task in answers]
    passed(score(problems, list(answers.values())))


def test_base_and_plus_are_told_apart():
    problem = evalplus_problem(ROWS["HumanEval/1006"])
    (verdict,) = score([problem], ["def is_big(x):\n    return x == 10 or x == 0"])
    assert (verdict.base.status, verdict.plus and verdict.plus.status) == ("pass", "fail")
    assert verdict.plus and verdict.plus.detail == "case 2: got True, expected False"


def test_chat_answers_are_sanitized():
    problem = evalplus_problem(ROWS["HumanEval/1000"])
    code = "def add(a, b):\n    return helper(a) + b\n\ndef helper(a):\n    return a"
    prose = f"Sure! Here it is:\n```python\n{code}\n```\nDone."
    endless = "def add(a, b):\n    return a + b\n" + "print(1)\n" * 900
    none = "I cannot do that, sorry.\n" * 3
    verdicts = score([problem] * 4, [prose, endless, none, "(" * 5000 + "\n\0"], form="chat")
    assert [verdict.base.status for verdict in verdicts] == ["pass", "pass", "fail", "fail"]


def test_longest_code_equals_evalplus():
    from evalplus.sanitize import code_extract

    from fcsd.eval.code.extraction import longest_code

    pieces = [
        "x = 1",
        "def f(x):",
        "    return x",
        "if x:",
        "else:",
        "  z = 3",
        '"""',
        '"""doc',
        "foo(",
        "1,",
        ")",
    ]
    pieces += [
        "text here now",
        "```python",
        "```",
        "@dec",
        "class A:",
        "        pass",
        "",
        "   ",
        "x = \\",
        "try:",
    ]
    pieces += [
        "'abc",
        "[1, 2",
        "] + [3]",
        "# note",
        'f"{x',
        "import os",
        "\tq",
        "match x:",
        "    case 1:",
        "async def h():",
    ]
    choose = random.Random(0)
    for _ in range(500):
        text = "\n".join(choose.choices(pieces, k=choose.randint(1, 10)))
        assert longest_code(text) == code_extract(text), text


def test_lm_eval_checks_are_scored_without_their_answers_entering():
    canonical = ROWS["HumanEval/1031"]
    table = CHECK.format(
        reference="",
        inputs="[[[1.0]], [[2.0, -7.5]], [[inf]]]",
        results="results = [[0.3333333333333333], [0.6666666666666666, -2.5], [inf]]",
        target="(inp, exp)",
        source="zip(inputs, results)",
        assertion="assertion(candidate(*inp), exp, 0)",
        entry_point="thirds",
    )
    cross = CHECK.format(
        reference="def ref_func(xs: List[float]):\n    return [x / 3 for x in xs]\n",
        inputs="[[[1.0]], [[2.0, -7.5]]]",
        results="",
        target="inp",
        source="inputs",
        assertion="assertion(candidate(*inp), ref_func(*inp), 0)",
        entry_point="thirds",
    )
    roots = CHECK.format(
        reference="def _poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n",
        inputs="[[[1, 2]]]",
        results="results = [-0.5]",
        target="(inp, exp)",
        source="zip(inputs, results)",
        assertion="assert _poly(*inp, candidate(*inp)) <= 0.0001",
        entry_point="find_zero",
    )
    problems = [problem_from_tests(f"check/{i}", text) for i, text in enumerate((table, cross, roots))]
    assert [problem.entry_point for problem in problems] == ["thirds", "thirds", "find_zero"]
    thirds = canonical["prompt"] + canonical["canonical_solution"]
    zero = ROWS["HumanEval/32"]
    right = score(problems, [thirds, thirds, zero["prompt"] + zero["canonical_solution"]])
    passed(right)
    assert right[0].plus is None
    with pytest.raises(FcsdError, match="no plus inputs"):
        pass_at_1(right, "plus")
    wrong = canonical["prompt"] + canonical["wrong"]
    failed = score(problems, [wrong, wrong, "def find_zero(xs):\n    return 1.0"])
    assert [verdict.base.status for verdict in failed] == ["fail"] * 3


def test_lm_eval_asserts_are_scored_without_their_answers_entering():
    tests = """import math
assert set(shared((3, 4), (4, 5))) == set((4,))
assert math.isclose(volume(3), 28.27, rel_tol=0.001)
assert [] == rest(1)
assert rest(0) is None
assert positive(2)
assert not positive(-2)
assert rest(math.inf) == {'a': (1, -2.5), 'b': {3}}"""
    problem = problem_from_tests("Mbpp/9000", tests)
    assert "28.27" not in json.dumps([case.call for case in problem.base])
    program = """
def shared(a, b): return list(set(a) & set(b))
def volume(r): return 3.14159 * r * r
def rest(x): return {1: [], 0: None}.get(x, {'a': (1, -2.5), 'b': {3}})
def positive(x): return x > 0
"""
    (right,) = score([problem], [program])
    passed([right])
    changed = [("list(set(a)", "list(set(b) | set(a)"), ("3.14159", "3.0"), ("x > 0", "True"), ("{3}", "{4}")]
    verdicts = score([problem] * len(changed), [program.replace(*change) for change in changed])
    assert [verdict.base.status for verdict in verdicts] == ["fail"] * len(changed)


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(1) == g(2)",
        "assert all(f(x) == y for x, y in [(1, 2)])",
        "for x in [1]:\n    assert f(x) == 1",
        "def check(candidate):\n    assert candidate(1) == other(2)\n\ncheck(f)",
        "assert f(1) == __import__('os').getcwd()",
        "import math",
        "not python",
    ],
)
def test_tests_of_another_shape_are_refused(tests: str):
    with pytest.raises(BadInputError, match="x/1"):
        problem_from_tests("x/1", tests)


def test_a_failing_reference_is_an_error_not_a_score():
    row = ROWS["HumanEval/1000"]
    problems = [
        evalplus_problem(row | {"canonical_solution": "    return undefined\n"}),
        replace(evalplus_problem(row), base=[]),
    ]
    verdicts = score(problems, ["def add(a, b):\n    return a + b"] * 2)
    assert [verdict.base.status for verdict in verdicts] == ["error", "error"]
    assert "NameError" in verdicts[0].base.detail
    with pytest.raises(FcsdError, match="2 of 2 problems have no verdict"):
        pass_at_1(verdicts, "base")


def test_bad_rows_are_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadInputError, match="no problems"):
        load_evalplus(tmp_path / "empty.jsonl")
    with pytest.raises(BadInputError, match="entry_point"):
        evalplus_problem({"task_id": "HumanEval/1"})


def test_a_program_that_takes_too_long_has_not_passed():
    passed, late = (Verdict(status, Outcome(status), None, "bwrap") for status in ("pass", "timeout"))
    assert pass_at_1([passed, late], "base") == 0.5


def test_no_verdict_no_number():
    error = Verdict("a", Outcome("error", "killed"), None, "bwrap")
    with pytest.raises(FcsdError, match="killed"):
        pass_at_1([error, Verdict("b", Outcome("pass"), None, "bwrap")], "base")
    with pytest.raises(FcsdError):
        pass_at_1([], "base")


SLEEPER = Problem("sleep/1", "nap", [Case([60], None)], [])
NAP = "import time\ndef nap(s):\n    time.sleep(s)"


def descendants(name: str) -> list[psutil.Process]:
    """Our processes, parents first, that have lived for a second, with `name` early in the command line."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end while we look
            if name in " ".join(child.cmdline()[:4]) and time.time() - child.create_time() > 1:
                found.append(child)
    return found


def kill_when_seen(name: str, times: int) -> threading.Thread:
    """Kill our first process called `name` that has lived for a second, `times` times."""

    def work() -> None:
        deadline = time.monotonic() + 60
        left = times
        while left and time.monotonic() < deadline:
            for child in descendants(name)[:1]:
                child.kill()
                left -= 1
            time.sleep(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_judging_process_killed_twice_is_an_error():
    killer = kill_when_seen("fcsd.eval.code.judge_worker", times=2)
    with pytest.raises(FcsdError, match="failed twice"):
        score([SLEEPER], [NAP], timeout_s=5)
    killer.join()


def test_sandbox_killed_twice_is_an_error_not_a_score():
    killer = kill_when_seen(find_sandbox().level, times=2)
    (verdict,) = score([SLEEPER], [NAP], timeout_s=20)
    killer.join()
    assert verdict.base.status == "error", verdict


def test_out_of_time_is_an_error():
    with pytest.raises(FcsdError, match="more than 3 s"):
        score([SLEEPER], [NAP], budget_s=3)


def test_no_sandbox_is_refused_unless_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sandboxes() == []
    problem = evalplus_problem(ROWS["HumanEval/1000"])
    program = ["def add(a, b):\n    return a + b"]
    with pytest.raises(FcsdError, match="no sandbox") as refused:
        score([problem], program)
    assert "bubblewrap" in (refused.value.hint or "")
    (verdict,) = score([problem], program, accept_unsafe_exec=True)
    assert (verdict.sandbox, verdict.base.status) == ("none", "pass")
