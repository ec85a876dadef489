"""Self-written problems in EvalPlus' row format, covering every comparison rule; each with a right and a wrong body.

Names and numbers of tasks with a special rule are those of the dataset, because the rule is chosen by them.
"""

# ruff: noqa: E501 - one problem per line
from typing import Any


def problem(
    task_id: str,
    signature: str,
    body: str,
    wrong: str,
    base: list[Any],
    plus: list[Any],
    *,
    atol: float = 0,
    header: str = "",
) -> dict[str, Any]:
    """An EvalPlus row and, under `wrong`, the body of a solution that a test must catch."""

    def indented(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.split("\n"))

    return {
        "task_id": task_id,
        "prompt": f"{header}def {signature}:\n",
        "entry_point": signature.split("(")[0],
        "canonical_solution": indented(body),
        "wrong": indented(wrong),
        "base_input": base,
        "plus_input": plus,
        "atol": atol,
    }


BISECT = """\
def value(x):
    return sum(c * x**i for i, c in enumerate(xs))
low, high = -1.0, 1.0
while value(low) * value(high) > 0:
    low, high = low * 2, high * 2
for _ in range(100):
    middle = (low + high) / 2
    if value(low) * value(middle) > 0:
        low = middle
    else:
        high = middle
return low"""

PROBLEMS = [
    # Plain equality for every kind of value.
    problem("HumanEval/1000", "add(a, b)", "return a + b", "return a - b", [[1, 2]], [[-5, 5], [0, 10**30]]),
    problem("HumanEval/1001", "greet(name)", "return 'hi ' + name", "return 'hi'", [["a"]], [["é\u2028\ud800"]]),
    problem("HumanEval/1002", "evens(xs)", "return [x for x in xs if x % 2 == 0]", "return xs", [[[2]]], [[[1, 4]], [[]]]),
    problem("HumanEval/1003", "swap(a, b)", "return b, a", "return [b, a]", [[1, 2]], [["x", None]]),
    problem("HumanEval/1004", "unique(xs)", "return set(xs)", "return set(xs[1:])", [[[1, 1, 2]]], [[["b", "a"]], [[]]]),
    problem("HumanEval/1005", "count(xs)", "return {x: xs.count(x) for x in xs}", "return {x: 1 for x in xs}", [[["a", "a"]]], [[[1, 2, 1]], [[]]]),
    problem("HumanEval/1006", "is_big(x)", "return x > 9", "return True", [[10], [9]], [[0]]),
    problem("HumanEval/1007", "first(xs)", "return xs[0] if xs else None", "return xs[0] if xs else 0", [[[5]]], [[[]]]),
    problem("HumanEval/1008", "to_bytes(text)", "return text.encode()", "return text", [["ab"]], [["ü"]]),
    problem("HumanEval/1009", "factorial(n)", "import math\nreturn math.factorial(n)", "return n", [[1], [5]], [[3000]]),
    problem("HumanEval/1010", "nest(n)", "out = []\nfor _ in range(n):\n    out = [out]\nreturn out", "return []", [[1]], [[100]]),
    problem("HumanEval/1011", "frozen(xs)", "return frozenset(xs)", "return sorted(xs)", [[[2, 1]]], [[[3, 3]]]),
    problem("HumanEval/1012", "counter(text)", "from collections import Counter\nreturn Counter(text)", "return len(text)", [["aab"]], [[""]]),
    problem("HumanEval/1013", "pair(n)", "from collections import namedtuple\nreturn namedtuple('P', 'a b')(n, n)", "return n", [[1]], [[2]]),
    problem("HumanEval/1014", "mean(xs)", "import numpy\nreturn numpy.mean(xs)", "return max(xs)", [[[1, 2]]], [[[1.5, 3.25, 8]]]),
    problem("HumanEval/1015", "primes(n)", "return [p for p in range(2, n) if all(p % q for q in range(2, p))]", "return [2]", [[5]], [[600]]),
    problem("HumanEval/1016", "words(text)", "return text.split()", "return text.split(' ')", [["a b"]], [["a  b"]]),
    problem("HumanEval/1017", "keep(xs)", "xs.append(1)\nreturn xs", "return xs", [[[0]]], [[[2]]]),
    problem("HumanEval/1018", "mixed(n)", "return {'a': [(n, {n}), None], (1, 2): b'x'}", "return {'a': []}", [[1]], [[2]]),
    problem("HumanEval/1019", "shout(text)", "return [c.upper() for c in text]", "return text", [["ab"]], [["xyz" * 50000]]),
    problem("HumanEval/1020", "order(xs)", "return list(set(xs))", "return []", [[["a", "b", "c"]]], [[["pear", "fig", "plum"]]]),
    problem("HumanEval/1021", "depth(n)", "return 0 if n == 0 else 1 + depth(n - 1)", "return 0", [[3]], [[900]]),
    # Float tolerance and special values.
    problem("HumanEval/1030", "third(x)", "return x / 3", "return x // 3", [[1.0]], [[2.0], [1e300]]),
    problem("HumanEval/1031", "thirds(xs)", "return [x / 3 for x in xs]", "return [x / 3.01 for x in xs]", [[[1.0]]], [[[2.0, -7.5]]]),
    problem("HumanEval/1032", "area(r)", "import math\nreturn math.pi * r * r", "return 3 * r * r", [[1.0]], [[10.0]], atol=1e-4),
    problem("HumanEval/1033", "rows(n)", "return [{'x': (n / 7, n)}]", "return [{'x': (n / 8, n)}]", [[1]], [[5]]),
    problem("HumanEval/1034", "blow(x)", "return x * 1e308 * 10", "return 1e308", [[1.0]], [[-1.0]]),
    problem("HumanEval/1035", "unknown(x)", "return [float('nan'), x]", "return [0.0, x]", [[1.0]], [[2]]),
    # Special rules, under the task names of the datasets.
    problem("HumanEval/32", "find_zero(xs: list)", BISECT, "return 0.5", [[[1, 2]]], [[[-6, 11, -6, 1]], [[-2, 0, 0, 1]]], atol=1e-4),
    problem("Mbpp/2", "similar_elements(a, b)", "return tuple(set(a) & set(b))", "return a", [[[3, 4], [4, 5]]], [[[1, 2, 3], [3, 1]]]),
    problem("Mbpp/7", "find_char_long(text)", "return [w for w in text.split() if len(w) > 3]", "return text.split()", [["a long word"]], [["none"]]),
    problem("Mbpp/164", "are_equivalent(a, b)", "return a == b", "raise ValueError(a)", [[36, 57]], [[2, 4]]),
    problem("Mbpp/295", "sum_div(n)", "return sum(d for d in range(1, n) if n % d == 0)", "return n", [[8]], [[12], [7]]),
    problem("Mbpp/581", "surface_Area(b, s)", "return 2 * b * s + b * b", "return b", [[3, 4]], [[4, 5]]),
    problem("Mbpp/558", "digit_distance_nums(a, b)", "return sum(abs(int(x) - int(y)) for x, y in zip(str(a), str(b)))", "return a", [[23, 56]], [[123, 256]]),
    problem("Mbpp/16", "text_match_three(text)", "return re.search('ab{3}', text)", "return None if 'abbb' in text else text", [["ac"]], [["caabbbbc"]], header="import re\n"),
    problem("Mbpp/124", "angle_complex(a, b)", "return cmath.phase(a + b)", "return a", [[0, "1j"]], [[2, "0j"]], header="import cmath\n"),
    problem("Mbpp/252", "convert(z)", "return abs(z), z.conjugate()", "return abs(z), z", [["1+2j"]], [["-3+4j"]]),
]  # fmt: skip
