"""An output counts as right where EvalPlus counts it as right."""

import math
from typing import Any

import pytest
from evalplus.eval import untrusted_check

from fcsd.eval.code.judge import score
from fcsd.eval.code.problems import Case, Problem

BIG = math.factorial(25)
# (output, expected value, absolute tolerance of the dataset)
PAIRS: list[tuple[Any, Any, float]] = [
    (BIG, BIG, 0),
    (BIG + 37, BIG, 0),
    (10**9 + 1, 10**9, 0),
    (10**9 + 1, 10**9, 1e-6),  # where the dataset names a tolerance, EvalPlus applies it to integers as well
    (10**9 + 1000, 10**9, 1e-6),
    ([BIG + 1], [BIG], 0),
    ([10**9 + 1, 2], [10**9, 2], 0),
    (1 / 3 + 1e-8, 1 / 3, 0),
    (1 / 3 + 1e-5, 1 / 3, 0),
    (1e12 + 1000, 1e12, 0),
    (1, 1.0, 0),
    (1, 1.0000001, 0),
    ([0.1 + 0.2, 1.0], [0.3, 1.0], 0),
    ((0.1 + 0.2, 1.0), [0.3, 1.0], 0),
    ([0.1 + 0.2], [0.3, 1.0], 0),
    ([0.1 + 0.2, 1], [0.3, 1], 0),  # not all items are floats
    ([[0.1 + 0.2]], [[0.3]], 0),  # nested floats
    ({"a": 0.1 + 0.2}, {"a": 0.3}, 0),
    ([[0.1 + 0.2]], [[0.3]], 1e-6),
    ("ab", "ab", 1e-6),
    ("ab", "ac", 1e-6),
    (True, 1, 0),
    (None, 0, 0),
    ([], [], 0),
    (float("inf"), float("inf"), 0),
    (float("-inf"), float("inf"), 0),
]


# Several cases of one problem, as pairs of output and expected value: EvalPlus keeps a tolerance that a case turned on.
SERIES: list[list[tuple[Any, Any]]] = [
    [(0.5, 0.5), (10**9 + 1, 10**9)],
    [(10**9 + 1, 10**9), (0.5, 0.5)],
    [("a", "a"), ([0.1 + 0.2], [0.3]), ("b", "c")],
]
PROBLEMS = [([(out, expected)], atol) for out, expected, atol in PAIRS] + [(series, 0.0) for series in SERIES]


@pytest.fixture(scope="module")
def judged() -> list[bool]:
    problems = [
        Problem(str(number), "f", [Case([case], expected, atol) for case, (_, expected) in enumerate(series)], [])
        for number, (series, atol) in enumerate(PROBLEMS)
    ]
    verdicts = score(problems, [program(series) for series, _ in PROBLEMS])
    return [verdict.base.status == "pass" for verdict in verdicts]


def program(series: list[tuple[Any, Any]]) -> str:
    return f"from math import inf\ndef f(x):\n    return {[out for out, _ in series]!r}[x]"


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_the_rule_is_that_of_evalplus(judged: list[bool], number: int):
    series, atol = PROBLEMS[number]
    inputs, expected = [[case] for case in range(len(series))], [value for _, value in series]
    status, _ = untrusted_check("humaneval", program(series), inputs, "f", expected, atol, [60.0] * len(series))
    assert judged[number] == (status == "pass")


def test_nearly_right_integers_fail():
    """Both programs passed under a relative tolerance of 1e-7."""
    factorial = Problem("factorial", "fact", [Case([n], math.factorial(n)) for n in range(13, 20)], [])
    root = Problem("root", "root", [Case([10**18 - 1], math.isqrt(10**18 - 1))], [])
    program = "import math\ndef fact(n): return math.factorial(n){}"
    programs = [program.format(""), program.format(" + 37"), "def root(n): return int(n**0.5)"]
    right, wrong, rounded = score([factorial, factorial, root], programs)
    assert right.base.status == "pass"
    assert wrong.base.status == rounded.base.status == "fail"
    assert rounded.base.detail == "case 0: got 1000000000, expected 999999999"
