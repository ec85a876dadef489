"""From what a model wrote to a program."""

import ast
from typing import Any

MOST_LINES = 1000  # of a chat answer that are searched for code


def program_text(problem: Any, generation: str, form: str) -> str:
    """The program to run, for `form` as in `fcsd.eval.code.score`."""
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
    """The valid span of two or more lines with most non-blank lines, the first of equals; else line one."""
    lines = text.split("\n")[:MOST_LINES]
    filled = [0]
    for line in lines:
        filled.append(filled[-1] + bool(line.strip()))
    spans = [
        (filled[first] - filled[last + 1], first, last)
        for first in range(len(lines))
        for last in range(first + 1, len(lines))
    ]
    for negative_size, first, last in sorted(spans):
        if negative_size == 0:
            break
        code = "\n".join(lines[first : last + 1])
        if _parses(code):
            return code
    return lines[0]


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
        return True
    except (SyntaxError, MemoryError, RecursionError, ValueError):
        return False
