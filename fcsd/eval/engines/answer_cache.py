"""Stores computed answers, one JSON line each, so that a killed evaluation repeats none of them.

A stored answer is checked before it is used: no score may come from a file that something else has changed.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fcsd.disk import naming, open_to_append
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of
from fcsd.input_lines import read_lines
from fcsd.launch.world import World

# A log-probability is at most zero. Rounding may raise a sum of many above it by less than this.
_ROUNDING = 1e-3
_MOST, _LONGEST = 4 << 30, 256 << 20  # bytes of a file of answers, and of one of them
_DELETE = "the file was changed or damaged: delete it, and the evaluation computes its answers again"


class AnswerCache:
    """Answers by request, appended to ``path`` as soon as they are known.

    A cache is for one model under one set of engine settings; the caller makes the path depend on both. If there are
    several ranks, each rank writes its own file. All ranks know the same answers from the start and exchange new ones
    by ``remember``, because they must agree on which requests are left.
    """

    def __init__(self, path: Path, world: World | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        of_rank = re.compile(rf"{re.escape(path.stem)}\.\d+{re.escape(path.suffix)}")
        files = [path, *(file for file in path.parent.iterdir() if of_rank.fullmatch(file.name))]
        self._answers: dict[str, Any] = {}
        for stored in [_read(files)] if world is None else world.everywhere(lambda: _read(files)):
            self._answers |= stored
        rank = 0 if world is None else world.rank
        self._file = open_to_append(path.with_suffix(f".{rank}{path.suffix}") if rank else path)
        self._file.write("\n")  # ends a line that a killed process may have left incomplete

    def get(self, request: Any, valid: Callable[[Any], bool]) -> Any:
        """The stored answer to a JSON-like request, or None.

        Raises:
            BadInputError: ``valid`` says of the stored answer that it cannot be one.
        """
        answer = self._answers.get(_key(request))
        if answer is not None and not valid(answer):
            raise BadInputError(f"{self._path}: a stored answer cannot be right: {answer!r:.80}", _DELETE)
        return answer

    def add(self, request: Any, answer: Any) -> None:
        """Store an answer in the file, where it remains if this process is killed."""
        self.remember(request, answer)
        with naming(self._path):
            self._file.write(json.dumps([_key(request), answer]) + "\n")
            self._file.flush()

    def remember(self, request: Any, answer: Any) -> None:
        """Keep an answer in memory that another rank has stored in its file."""
        self._answers[_key(request)] = answer

    def close(self) -> None:
        """Close the file; the cache cannot be used afterwards."""
        with naming(self._path):
            self._file.close()


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_loglikelihood(answer: Any) -> bool:
    """Whether an answer is ``(log-probability in nats, whether it is the greedy continuation)``."""
    pair = isinstance(answer, list | tuple) and len(answer) == 2
    return pair and is_number(answer[0]) and answer[0] <= _ROUNDING and isinstance(answer[1], bool)


def is_text(answer: Any) -> bool:
    """Whether an answer is a generated text."""
    return isinstance(answer, str)


def is_length(answer: Any) -> bool:
    """Whether an answer is ``[tokens of a generated answer, whether it ended]``."""
    pair = isinstance(answer, list | tuple) and len(answer) == 2
    return pair and type(answer[0]) is int and answer[0] > 0 and isinstance(answer[1], bool)


def _key(request: Any) -> str:
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()


def _read(files: Sequence[Path]) -> dict[str, Any]:
    answers = {}
    for path in filter(Path.exists, files):
        try:
            for line in read_lines(path, _LONGEST, _MOST):
                try:
                    stored = json.loads(line.decode())
                except json.JSONDecodeError:  # an empty or incomplete line
                    continue
                if not isinstance(stored, list) or len(stored) != 2 or not isinstance(stored[0], str):
                    raise ValueError(f"{line[:80]!r} is not the key of a request and its answer")
                answers[stored[0]] = stored[1]
        except (OSError, ValueError, RecursionError) as error:
            raise BadInputError(f"{path}: stored answers cannot be read: {reason_of(error)}", _DELETE) from error
    return answers
