"""An output counts as right where EvalPlus counts it as right."""

import math
from typing import Any

import pytest
from evalplus.eval import untrusted_check

from fcsd.eval.code.comparison import RULES, Case
from fcsd.eval.code.judge import Problem, score

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


@pytest.mark.parametrize("out, expected, atol", PAIRS)
def test_the_rule_is_that_of_evalplus(out: Any, expected: Any, atol: float):
    code = f"from math import inf\ndef f(x):\n    return {out!r}"
    status, _ = untrusted_check("humaneval", code, [[1]], "f", [expected], atol, [60.0])
    try:
        is_right = RULES["evalplus"]([1], out, expected, Case([1], atol=atol))
    except Exception:  # the caller counts it as wrong
        is_right = False
    assert is_right == (status == "pass")


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
