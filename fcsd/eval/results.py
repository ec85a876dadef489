"""Result rows on disk: one JSON list per model, replaced as a whole, earlier rows of other settings kept."""

import json
from pathlib import Path
from typing import Any

from fcsd.disk import write_text
from fcsd.errors import BadInputError

Row = dict[str, Any]

# The metrics whose items are (log-likelihood, words or bytes): reported as exp(-ratio).
PERPLEXITIES = ("word_perplexity", "byte_perplexity")


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file.

    Raises:
        BadInputError: not such a file.
    """
    try:
        rows = json.loads(path.read_text())
        if not all(isinstance(row, dict) and {"model", "column", "items"} <= row.keys() for row in rows):
            raise ValueError("no result rows")
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(f"{path} is not a result file of fcsd eval") from error
    return rows


def is_accuracy(row: Row) -> bool:
    """Whether the value is a fraction, shown in points; otherwise it is a loss or a perplexity."""
    return row["metric"] not in (*PERPLEXITIES, "nll_per_token")


def shown(row: Row) -> tuple[str, str]:
    """The value and its standard error as people read them."""
    if is_accuracy(row):
        return f"{100 * row['value']:.1f}", f"{100 * row['stderr']:.1f}"
    return f"{row['value']:.3f}", f"{row['stderr']:.3f}"


class ResultFile:
    """A model's results; a row replaces an earlier one only if task, settings and data are the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = read_rows(path) if path.exists() else []

    def add(self, row: Row) -> None:
        """Add or replace a row and write the file anew."""
        self._rows = [other for other in self._rows if _key(other) != _key(row)] + [row]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, "[\n" + ",\n".join(map(json.dumps, self._rows)) + "\n]\n")


def _key(row: Row) -> tuple[str, ...]:
    return (row["suite"], row["column"], row["settings_sha256"], row["data_sha256"])
