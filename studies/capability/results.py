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

KEPT = ("column", "metric", "value", "stderr", "n", "chance", "items", "settings_sha256", "data_sha256")


def packed(result: Result) -> Result:
    """A result without what is the same in all of them; items that are 0 or 1 become a string of digits."""
    kept = {key: result[key] for key in KEPT}
    if all(item in (0, 1) for item in result["items"] if not isinstance(item, list)) and result["metric"] != (
        "nll_per_token"
    ):
        kept["items"] = "".join(str(int(item)) for item in result["items"])
    else:
        kept["items"] = [[round(nll, 4), count] for nll, count in result["items"]]
    return kept


def unpacked(result: Result) -> Result:
    """A stored result whose items are numbers again."""
    items = result["items"]
    return {**result, "items": [float(digit) for digit in items] if isinstance(items, str) else items}


def read_lines(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The lines of several files by name; a later line replaces an earlier one of its name."""
    lines = {}
    for path in paths:
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            lines[line["name"]] = line
    return lines


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
