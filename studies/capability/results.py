"""Stored results of the capability study: one JSON object per line, one line per model or sweep that has ended.

A line of a model has its ``name``, the fields of its ``run``, what was trained (``steps``, ``batch_tokens``, ``lr``,
``seconds``, the last ``metrics``), and ``results``: per benchmark what ``fcsd eval`` found, the questions packed. A
line of a sweep has its ``name``, the ``chosen`` values and the value of each of its ``trials``.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fcsd.eval.results import Result


def unpacked(result: Result) -> Result:
    """A stored result whose items are numbers again; those that are 0 or 1 are stored as a string of digits."""
    items = result["items"]
    return {**result, "items": [float(digit) for digit in items] if isinstance(items, str) else items}


def read_lines(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The lines of several files by name; a later line replaces an earlier one of its name."""
    lines = [json.loads(text) for path in paths for text in path.read_text().splitlines()]
    return {line["name"]: line for line in lines}
