"""Makes problems from the rows of code benchmarks.

An EvalPlus row has inputs and a canonical solution; the values that the solution returns in the sandbox are the
expected ones. An lm-eval row is a test *program* that contains the expected values. Untrusted code that runs in the
same process could read them there. Therefore the test program is parsed: the calls go into the sandbox, and the
expected values stay outside. A test of an unknown shape is refused with `BadInputError` and never run.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of
from fcsd.input_lines import read_lines
from fcsd.strict_json import finite_number, parse

_CONSTRUCTORS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "dict": dict}
_CONSTRUCTORS |= {"float": float, "complex": complex}
_LONGEST_ROW = 40_000_000  # bytes; a row holds all inputs of a problem
_NAMES = {"inf": float("inf"), "nan": float("nan")}


@dataclass(frozen=True)
class Case:
    """One call of the program and the value that it should return.

    Attributes:
        call: the arguments for the entry point, or an expression.
        expected: the right value, where the dataset has it; unused where a reference program computes it.
        atol: absolute tolerance.
        rtol: of an expression: None for a value that must be equal, otherwise the relative tolerance of
            `math.isclose`. EvalPlus' comparison, which judges the calls of an entry point, has its own.
    """

    call: Any
    expected: Any = None
    atol: float = 0.0
    rtol: float | None = None


@dataclass(frozen=True)
class Problem:
    """One task of a code benchmark.

    Attributes:
        entry_point: function called with each case's arguments; None where cases are expressions.
        dataset: `humaneval` or `mbpp`; by it and the entry point EvalPlus chooses how it compares.
        base, plus: the original tests and EvalPlus' additional ones.
        prefix: the code that a model is asked to continue (HumanEval's prompt).
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
    dataset: str = "humaneval"

    @property
    def not_none(self) -> bool:
        """Whether it only counts that a value is not None: match objects cannot be sent as data."""
        from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS

        return self.dataset == "mbpp" and self.entry_point in MBPP_OUTPUT_NOT_NONE_TASKS


def load_evalplus(path: Path) -> list[Problem]:
    """HumanEvalPlus or MbppPlus from EvalPlus' `.jsonl` or `.jsonl.gz`.

    Raises:
        BadInputError: the file cannot be read or has no rows, or a row is not EvalPlus'.
    """
    rows = []
    try:
        for number, line in enumerate(read_lines(path, _LONGEST_ROW), 1):
            if line.strip():
                rows.append((number, parse(line, measured=True)))  # a function may be called with any number
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read as EvalPlus' problems: {reason_of(error)}") from error
    if not rows:
        raise BadInputError(f"{path} contains no problems")
    problems = []
    for number, row in rows:
        try:
            problems.append(evalplus_problem(row))
        except BadInputError as error:
            raise BadInputError(f"{path}:{number}: {error}", error.hint) from error
    return problems


def evalplus_problem(row: dict[str, Any]) -> Problem:
    """The problem of a row (task_id, prompt, entry_point, canonical_solution, base_input, plus_input, atol).

    Raises:
        BadInputError: the row has another form.
    """
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    try:
        _check_types(row)
        dataset = row["task_id"].split("/")[0]
        cases = {
            tests: [
                Case(list(arguments), atol=row["atol"])
                for arguments in (
                    mbpp_deserialize_inputs(row["task_id"], row[tests]) if dataset == "Mbpp" else row[tests]
                )
            ]
            for tests in ("base_input", "plus_input")
        }
        return Problem(
            task_id=row["task_id"],
            entry_point=row["entry_point"],
            base=cases["base_input"],
            plus=cases["plus_input"],
            prefix=row["prompt"],
            reference=row["prompt"] + row["canonical_solution"],
            dataset=dataset.lower(),
        )
    except KeyError as error:
        raise BadInputError(f"not an EvalPlus row: {row.get('task_id')!r:.80} has no {error}") from error
    except Exception as error:  # EvalPlus' own reader and the checks above can fail in any way on data of another form
        raise BadInputError(f"not an EvalPlus row: {type(error).__name__}: {reason_of(error)}") from error


def _check_types(row: dict[str, Any]) -> None:
    for name in ("task_id", "entry_point", "prompt", "canonical_solution"):
        if not isinstance(row[name], str):
            raise TypeError(f"{name} is not a text")
    if finite_number(row["atol"]) < 0:
        raise TypeError("atol is not a tolerance")
    for name in ("base_input", "plus_input"):
        if row[name] and not (isinstance(row[name], list) and all(isinstance(call, list) for call in row[name])):
            raise TypeError(f"{name} is not a list of lists of arguments")


def problem_from_tests(task_id: str, tests: str) -> Problem:
    """A problem from lm-eval's test program: `check(candidate)` of HumanEval+, or the asserts of MBPP+.

    Args:
        tests: lm-eval's target: `test` and the final `check(entry_point)`, or the asserts.

    Raises:
        BadInputError: the program has another shape.
    """
    try:
        module = ast.parse(tests)
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name == "check":
                return _from_check(task_id, module, node)
        imports, asserts = _split(module.body, (ast.Import, ast.ImportFrom))
        cases = [_from_assert(statement) for statement in asserts]
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise BadInputError(f"{task_id}: tests of a shape that cannot be scored safely: {error}") from error
    if not cases:
        raise BadInputError(f"{task_id}: no tests")
    return Problem(task_id, None, cases, [], suffix="\n".join(map(ast.unparse, imports)))


def _from_check(task_id: str, module: ast.Module, check: ast.FunctionDef) -> Problem:
    """EvalPlus' generated `check`: `inputs`, `results` or a `ref_func`, and one assertion in a loop."""
    if all(isinstance(statement, ast.Assert) for statement in check.body):
        return _from_plain_check(task_id, module, check)
    *assignments, loop = check.body
    values = dict(_assigned(statement) for statement in assignments)
    call = module.body[-1]
    if not (isinstance(call, ast.Expr) and isinstance(call.value, ast.Call) and isinstance(loop, ast.For)):
        raise ValueError("check() is not a loop that is called at the end")
    entry_point = ast.unparse(call.value.args[0])
    (assertion,) = loop.body
    form = ast.unparse(assertion)
    atol = _assertion(assertion, entry_point)
    reference = None
    if "ref_func(" in form:
        helpers = [node for node in module.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef) and node is not check]
        lines = ["from typing import *", "import math", *map(ast.unparse, [*helpers, *functions])]
        reference = "\n".join([*lines, f"{entry_point} = ref_func"])
    results = values.get("results", [None] * len(values["inputs"]))
    if len(results) != len(values["inputs"]) or ("results" not in values and reference is None):
        raise ValueError("inputs and results do not pair up")
    cases = [
        Case(list(arguments), expected, atol) for arguments, expected in zip(values["inputs"], results, strict=True)
    ]
    return Problem(task_id, entry_point, cases, [], reference=reference)


def _from_plain_check(task_id: str, module: ast.Module, check: ast.FunctionDef) -> Problem:
    """HumanEval's original `check`: plain asserts about `candidate`, called with the function at the end."""
    call = module.body[-1]
    if not (isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)):
        raise ValueError("check() is not called at the end")
    cases = [_from_assert(statement) for statement in check.body]
    suffix = f"candidate = {ast.unparse(call.value.args[0])}"
    return Problem(task_id, None, cases, [], suffix=suffix)


def _assertion(statement: ast.stmt, entry_point: str) -> float:
    """The tolerance of `assertion(candidate(*inp), ..., atol)`, or of `assert ..._poly(...) <= atol` for HumanEval/32.

    EvalPlus compares by the name of the entry point: `find_zero` with the polynomial, everything else with the value.
    """
    is_root = entry_point == "find_zero"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value
        if ast.unparse(called.func) == "assertion" and ast.unparse(called.args[0]) == "candidate(*inp)" and not is_root:
            return float(literal(called.args[2]))
    test = statement.test if isinstance(statement, ast.Assert) else None
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.LtE)
        and is_root
        and "_poly(" in ast.unparse(test.left)
    ):
        return float(literal(test.comparators[0]))
    raise ValueError(f"unknown assertion {ast.unparse(statement)!r}")


def _from_assert(statement: ast.stmt) -> Case:
    """`assert CALL == VALUE`, `assert math.isclose(CALL, VALUE, ...)`, `assert CALL`, `assert not CALL`."""
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"not an assert: {ast.unparse(statement)[:60]!r}")
    test = statement.test
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.Is)) and len(test.ops) == 1:
        call, expected = _call_and_value(test.left, test.comparators[0])
        return Case(call, expected)
    if isinstance(test, ast.Call) and ast.unparse(test.func) in ("math.isclose", "isclose"):
        call, expected = _call_and_value(*test.args)
        options = {keyword.arg: float(literal(keyword.value)) for keyword in test.keywords}
        return Case(call, expected, options.get("abs_tol", 0.0), options.get("rel_tol", 1e-9))
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    subject = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    if isinstance(subject, ast.Call) and not any(isinstance(node, ast.Compare) for node in ast.walk(subject)):
        return Case(f"bool({ast.unparse(subject)})", not negated)
    raise ValueError(f"unknown assertion {ast.unparse(test)[:60]!r}")


def _call_and_value(left: ast.expr, right: ast.expr) -> tuple[str, Any]:
    """The source of the side that the sandbox evaluates, and the value of the other side."""
    for call, value in ((left, right), (right, left)):
        try:
            return ast.unparse(call), literal(value)
        except ValueError:
            continue
    raise ValueError("neither side is a plain value")


def literal(node: ast.expr | None) -> Any:
    """Like `ast.literal_eval`, and also accepts `inf`, `nan` and the constructors of builtin types.

    Raises:
        ValueError: the expression is something else.
    """
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CONSTRUCTORS:
        return _CONSTRUCTORS[node.func.id](*(literal(argument) for argument in node.args))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return kind(literal(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {literal(key): literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -literal(node.operand)
    if node is None:
        raise ValueError("unpacking in a dict")
    return ast.literal_eval(node)


def _assigned(statement: ast.stmt) -> tuple[str, Any]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, literal(statement.value)
    raise ValueError(f"not an assignment: {ast.unparse(statement)[:60]!r}")


def _split(body: list[ast.stmt], kinds: tuple[type, ...]) -> Iterator[list[ast.stmt]]:
    yield [node for node in body if isinstance(node, kinds)]
    yield [node for node in body if not isinstance(node, kinds)]
