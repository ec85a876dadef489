"""The comparison rules of HumanEval+ and MBPP+, which decide whether the output of a program is right.

A rule is a function `(arguments, out, expected, case) -> bool`. `out` comes from an untrusted program, but it was
decoded from JSON and holds builtin types only. A rule may raise an exception; the caller then counts the output as
wrong. A comparison of hostile values may need any amount of time and memory, so it runs only in a process with limits
(`fcsd.eval.code.judge_worker`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RELATIVE = 1e-7  # EvalPlus' relative tolerance, the default of `numpy.testing.assert_allclose`
FLOAT_TOLERANCE = 1e-6  # EvalPlus' absolute tolerance for floats where the dataset names none


@dataclass(frozen=True)
class Case:
    """One call of the program and the value that it should return.

    Attributes:
        call: the arguments for the entry point, or an expression.
        expected: the right value, where the dataset has it; unused where a reference program computes it.
        rule: key of `RULES`.
        atol, rtol: absolute and relative tolerance, for the rules that use them.
    """

    call: Any
    expected: Any = None
    rule: str = "evalplus"
    atol: float = 0.0
    rtol: float = RELATIVE


def exact(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """`assert out == expected`."""
    return out == expected


def isclose(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """`assert math.isclose(out, expected, rel_tol=rtol, abs_tol=atol)`."""
    return math.isclose(out, expected, rel_tol=case.rtol, abs_tol=case.atol)


def evalplus(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """EvalPlus' rule for tasks without a rule of their own (`evalplus.eval.unsafe_execute`)."""
    return _equal_or_close(out == expected, out, expected, case.atol)


def set_equal(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """The same elements in any order and any number (MBPP+ tasks that return a list made from a set)."""
    return _equal_or_close(set(out) == set(expected), out, expected, case.atol)


def root(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Any zero of the polynomial with the given coefficients (HumanEval/32)."""
    from evalplus.eval._special_oracle import _poly

    (coefficients,) = arguments
    return abs(_poly(coefficients, out)) <= case.atol


def anything(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Every returned value is right (Mbpp/164, whose tests contradict each other)."""
    return True


def or_zero(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Mbpp/295: the divisors may or may not include the number itself, and zero is accepted."""
    return _equal_or_close(out == expected or out == 0, out, expected, case.atol)


def surface_area(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Mbpp/581: the height of the pyramid may be read as the slant height or as the perpendicular height."""
    from evalplus.eval._special_oracle import _surface_Area

    is_equal = out == expected or abs(out - _surface_Area(*arguments)) <= case.atol
    return _equal_or_close(is_equal, out, expected, case.atol)


def digit_distance(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Mbpp/558: numbers of unequal length may be padded with zeros."""
    from evalplus.eval._special_oracle import _digit_distance_nums

    return _equal_or_close(out == expected or out == _digit_distance_nums(*arguments), out, expected, case.atol)


RULES: dict[str, Callable[[Any, Any, Any, Case], bool]] = {
    "evalplus": evalplus,
    "exact": exact,
    "isclose": isclose,
    "set_equal": set_equal,
    "root": root,
    "anything": anything,
    "or_zero": or_zero,
    "surface_area": surface_area,
    "digit_distance": digit_distance,
    # The sandbox returns `value is not None` instead of the value: match objects cannot be sent as data.
    "not_none": exact,
}


def rule_name(dataset: str, entry_point: str) -> str:
    """The key in `RULES` for an EvalPlus problem; `dataset` is `HumanEval` or `Mbpp`."""
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS, MBPP_OUTPUT_SET_EQ_TASKS

    if dataset == "HumanEval":
        return "root" if entry_point == "find_zero" else "evalplus"
    special = {
        "are_equivalent": "anything",
        "sum_div": "or_zero",
        "surface_Area": "surface_area",
        "digit_distance_nums": "digit_distance",
        **dict.fromkeys(MBPP_OUTPUT_SET_EQ_TASKS, "set_equal"),
        **dict.fromkeys(MBPP_OUTPUT_NOT_NONE_TASKS, "not_none"),
    }
    return special.get(entry_point, "evalplus")


def _equal_or_close(is_equal: bool, out: Any, expected: Any, atol: float) -> bool:
    """Equal, or within a tolerance where EvalPlus applies one.

    A tolerance applies where the dataset names one, or where `expected` is a float or a non-empty list or tuple of
    floats. Everything else must be equal: integers, and floats nested in other values. EvalPlus differs in one point:
    once a case has turned the tolerance on, it stays on for the later cases of that problem.
    """
    import numpy
    from evalplus.eval import is_floats

    if atol == 0 and is_floats(expected):
        atol = FLOAT_TOLERANCE
    if is_equal or atol == 0:
        return bool(is_equal)
    if type(out) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)) and len(out) != len(expected):
        return False
    return bool(numpy.allclose(out, expected, rtol=RELATIVE, atol=atol))
