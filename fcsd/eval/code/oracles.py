"""When an output counts as right: the comparison rules of HumanEval+ and MBPP+, on plain data only.

An oracle is `(arguments, out, expected, case) -> bool`; `out` has been decoded from what the sandbox returned
and is untrusted data, but only builtins. An oracle may raise on it, which means "wrong". The special rules
and the names they hold for are EvalPlus' own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One call and what it should give.

    Attributes:
        call: the arguments for the entry point, or an expression.
        expected: the value, where the dataset has it; unused where a reference program computes it.
        oracle: key of `ORACLES`.
        atol, rtol: tolerances of the oracles that use them.
    """

    call: Any
    expected: Any = None
    oracle: str = "evalplus"
    atol: float = 0.0
    rtol: float = 1e-7


def exact(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """`assert out == expected`."""
    return out == expected


def isclose(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """`assert math.isclose(out, expected, rel_tol=rtol, abs_tol=atol)`."""
    return math.isclose(out, expected, rel_tol=case.rtol, abs_tol=case.atol)


def evalplus(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Equal, or of the same type and within tolerance (1e-6 for floats where the dataset names none).

    Unlike EvalPlus, two NaN are equal and tolerance also reaches floats in nested lists and dicts.
    """
    atol = case.atol or (1e-6 if _has_float(expected) else 0.0)
    return out == expected or (type(out) is type(expected) and _near(out, expected, atol, case.rtol))


def set_equal(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Same elements in any order, any number of times (MBPP+ tasks that return a list made from a set)."""
    return set(out) == set(expected)


def root(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """A zero of the polynomial with the given coefficients (HumanEval/32); any zero will do."""
    from evalplus.eval._special_oracle import _poly

    (coefficients,) = arguments
    return abs(_poly(coefficients, out)) <= case.atol


def anything(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Returning at all is right (Mbpp/164, whose tests contradict each other)."""
    return True


def or_zero(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Mbpp/295: divisors may or may not include the number, and zero is accepted."""
    return out == 0 or evalplus(arguments, out, expected, case)


def surface_area(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Mbpp/581: the height of the pyramid may be read as slant or as perpendicular height."""
    from evalplus.eval._special_oracle import _surface_Area

    return abs(out - _surface_Area(*arguments)) <= case.atol or evalplus(arguments, out, expected, case)


def digit_distance(arguments: Any, out: Any, expected: Any, case: Case) -> bool:
    """Mbpp/558: numbers of unequal length may be padded with zeros."""
    from evalplus.eval._special_oracle import _digit_distance_nums

    return out == _digit_distance_nums(*arguments) or evalplus(arguments, out, expected, case)


ORACLES: dict[str, Callable[[Any, Any, Any, Case], bool]] = {
    "evalplus": evalplus,
    "exact": exact,
    "isclose": isclose,
    "set_equal": set_equal,
    "root": root,
    "anything": anything,
    "or_zero": or_zero,
    "surface_area": surface_area,
    "digit_distance": digit_distance,
    # The runner replaces the value by "is not None": match objects are not data.
    "not_none": exact,
}


def oracle_name(dataset: str, entry_point: str) -> str:
    """The oracle of an EvalPlus problem; `dataset` is `HumanEval` or `Mbpp`."""
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


def _has_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_float(item) for item in value.values())
    if isinstance(value, (list, tuple, frozenset)):
        return any(_has_float(item) for item in value)
    return isinstance(value, (float, complex))


def _near(out: Any, expected: Any, atol: float, rtol: float) -> bool:
    if isinstance(expected, (list, tuple)):
        return (
            type(out) is type(expected)
            and len(out) == len(expected)
            and all(_near(a, b, atol, rtol) for a, b in zip(out, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(out, dict)
            and out.keys() == expected.keys()
            and all(_near(out[key], expected[key], atol, rtol) for key in expected)
        )
    if isinstance(expected, (int, float, complex)) and isinstance(out, (int, float, complex)):
        return out == expected or (out != out and expected != expected) or _close(out, expected, atol, rtol)
    return out == expected


def _close(out: Any, expected: Any, atol: float, rtol: float) -> bool:
    distance = abs(out - expected)
    return distance <= atol + rtol * abs(expected) and distance < float("inf")
