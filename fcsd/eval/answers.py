"""Answers already computed, one JSON line each, so that a killed evaluation resumes without repeating any."""

import hashlib
import json
from pathlib import Path
from typing import Any


class AnswerCache:
    """Answers by request, appended to ``path`` as they come.

    One cache belongs to one model under one set of engine settings: the caller puts both into the path.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._answers = dict(_read(path)) if path.exists() else {}
        self._file = path.open("a")
        self._file.write("\n")  # ends a line that a killed process left unfinished

    def get(self, request: Any) -> Any:
        """The stored answer to a JSON-like request, or None."""
        return self._answers.get(_key(request))

    def add(self, request: Any, answer: Any) -> None:
        """Store an answer; it survives the death of this process."""
        key = _key(request)
        self._answers[key] = answer
        self._file.write(json.dumps([key, answer]) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; the cache cannot be used afterwards."""
        self._file.close()


def _key(request: Any) -> str:
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()


def _read(path: Path):
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # empty, or being written when the process died
