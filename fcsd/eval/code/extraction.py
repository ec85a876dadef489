"""Extracts the program from the text that a model wrote.

The search may need minutes and gigabytes on a hostile answer, so it runs only in a process with limits
(`fcsd.eval.code.judge_worker`).
"""

import ast
import bisect
import codeop
from typing import Literal

MAX_LINES = 1000  # lines of a chat answer that are searched for code


def sanitize(text: str, entry_point: str | None) -> str:
    """The code in `text` that `entry_point` needs, found by EvalPlus' sanitizer; empty where there is none.

    EvalPlus searches for the code by parsing every span of lines, which takes minutes on a long answer. That search is
    replaced by `longest_code`, which has the same result. The replacement changes the library, so this function may be
    called only in a process of its own.
    """
    import evalplus.sanitize

    evalplus.sanitize.code_extract = longest_code
    try:
        return evalplus.sanitize.sanitize(text, entry_point)
    except (RecursionError, ValueError):  # nesting or NUL bytes that neither parser takes
        return ""


def longest_code(text: str) -> str:
    """The valid span of two or more lines that has the most non-blank lines; the first line where no span is valid.

    Of several such spans the first is taken. Spans are tried from the longest to the shortest. When a line cannot
    follow the lines before it, every span that holds these lines is invalid. So the first failure of a start line
    determines how far the spans from that line can reach at all.
    """
    lines = text.split("\n")[:MAX_LINES]
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
    """The first line, at most `broken`, that no program starting at line `first` can contain."""
    step = 1
    while first + step < broken and _state(lines[first : first + step + 1]) != "broken":
        step *= 2
    ends = range(first, min(first + step, broken) + 1)
    return ends[bisect.bisect_left(ends, True, key=lambda last: _state(lines[first : last + 1]) == "broken")]


def _state(lines: list[str]) -> Literal["valid", "open", "broken"]:
    """`valid`: the lines are a program. `open`: they can begin one. `broken`: no continuation makes them a program."""
    try:
        flags = ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # pyright: ignore[reportAttributeAccessIssue]
        compile("\n".join(lines), "", "exec", flags)
        return "valid"
    except SyntaxError as error:
        return "open" if "incomplete input" in str(error) else "broken"
    except (MemoryError, RecursionError, ValueError):  # nesting or NUL bytes that the parser does not take
        return "broken"
