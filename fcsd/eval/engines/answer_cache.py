"""Stores computed answers, one JSON line each, so that a killed evaluation repeats none of them."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcsd.launch.world import World


class AnswerCache:
    """Answers by request, appended to ``path`` as soon as they are known.

    A cache is for one model under one set of engine settings; the caller makes the path depend on both. If there are
    several ranks, each rank writes its own file. All ranks know the same answers from the start and exchange new ones
    by ``remember``, because they must agree on which requests are left.
    """

    def __init__(self, path: Path, world: World | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        files = [path, *path.parent.glob(f"{path.stem}.*{path.suffix}")]
        self._answers: dict[str, Any] = {}
        for stored in [_read(files)] if world is None else world.everywhere(lambda: _read(files)):
            self._answers |= stored
        rank = 0 if world is None else world.rank
        self._file = (path.with_suffix(f".{rank}{path.suffix}") if rank else path).open("a")
        self._file.write("\n")  # ends a line that a killed process may have left incomplete

    def get(self, request: Any) -> Any:
        """The stored answer to a JSON-like request, or None."""
        return self._answers.get(_key(request))

    def add(self, request: Any, answer: Any) -> None:
        """Store an answer in the file, where it remains if this process is killed."""
        self.remember(request, answer)
        self._file.write(json.dumps([_key(request), answer]) + "\n")
        self._file.flush()

    def remember(self, request: Any, answer: Any) -> None:
        """Keep an answer in memory that another rank has stored in its file."""
        self._answers[_key(request)] = answer

    def close(self) -> None:
        """Close the file; the cache cannot be used afterwards."""
        self._file.close()


def _key(request: Any) -> str:
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()


def _read(files: Sequence[Path]) -> dict[str, Any]:
    answers = {}
    for line in "\n".join(path.read_text() for path in files if path.exists()).splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # an empty or incomplete line
            key, answer = json.loads(line)
            answers[key] = answer
    return answers
