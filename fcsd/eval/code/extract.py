"""From what a model wrote to a program."""

import ast
import bisect
import codeop
from typing import Any, Literal

MOST_LINES = 1000  # of a chat answer that are searched for code


def program_text(problem: Any, generation: str, form: str) -> str:
    """The program to run, for `form` as in `fcsd.eval.code.judge.score`."""
    if form == "chat":
        return sanitize(generation, problem.entry_point)
    return problem.prefix + generation if form == "completion" else generation


def sanitize(text: str, entry_point: str | None) -> str:
    """EvalPlus' sanitizer: the code in `text` that `entry_point` needs; empty where there is none.

    Its search for the code parses every span of lines, which takes minutes on a long answer; it is replaced
    by one with the same result. Only for a process of its own (the scorer): it changes the library.
    """
    import evalplus.sanitize

    evalplus.sanitize.code_extract = longest_code
    try:
        return evalplus.sanitize.sanitize(text, entry_point)
    except (RecursionError, ValueError):  # nesting or NUL bytes that neither parser takes
        return ""


def longest_code(text: str) -> str:
    """The valid span of two or more lines with most non-blank lines, the first of equals; else line one.

    Spans are tried longest first. A line that cannot follow the lines before it rules out every span that
    holds both, so the first failure from a start finds out how far that start reaches at all.
    """
    lines = text.split("\n")[:MOST_LINES]
    filled = [0]
    for line in lines:
        filled.append(filled[-1] + bool(line.strip()))
    spans = [
        (filled[first] - filled[last + 1], first, last)
        for first in range(len(lines))
        for last in range(first + 1, len(lines))
    ]
    reaches: dict[int, int] = {}
    for negative_size, first, last in sorted(spans):
        if negative_size == 0:
            break
        if last >= reaches.get(first, len(lines)):
            continue
        state = _state(lines[first : last + 1])
        if state == "valid":
            return "\n".join(lines[first : last + 1])
        if state == "broken":
            reaches[first] = _reach(lines, first, last)
    return lines[0]


def _reach(lines: list[str], first: int, broken: int) -> int:
    """The first line that no program starting at `first` can hold; `broken` or one before it."""
    step = 1
    while first + step < broken and _state(lines[first : first + step + 1]) != "broken":
        step *= 2
    ends = range(first, min(first + step, broken) + 1)
    return ends[bisect.bisect_left(ends, True, key=lambda last: _state(lines[first : last + 1]) == "broken")]


def _state(lines: list[str]) -> Literal["valid", "open", "broken"]:
    """Whether lines are a program, could begin one, or can never, whatever follows."""
    try:
        flags = ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # pyright: ignore[reportAttributeAccessIssue]
        compile("\n".join(lines), "", "exec", flags)
        return "valid"
    except SyntaxError as error:
        return "open" if "incomplete input" in str(error) else "broken"
    except (MemoryError, RecursionError, ValueError):  # nesting or NUL bytes that the parser does not take
        return "broken"
