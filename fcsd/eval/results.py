"""Reads and writes results: one JSON file per model with a list of one result per task, always replaced as a whole.

A directory of results also holds ``comparison.json``, which is not a list of results. ``read_directory`` reads the
results of a directory and skips that file.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcsd.checkpoint.location import RUN_RECIPE
from fcsd.disk import json_sha256, read_input, write_text
from fcsd.errors import BadInputError
from fcsd.eval.engines.answer_cache import is_number
from fcsd.eval.suite import Benchmark
from fcsd.strict_json import parse
from fcsd.terminal import printable

# One model's score on one task, as ``evaluate_models`` describes it.
Result = dict[str, Any]

# The verdicts on the models of a directory; no model's file may have this name.
COMPARISON = "comparison.json"
_MAX_RESULTS = 4 << 30  # bytes; a file holds every item of every task

# Metrics whose items are (log-likelihood, units), and the unit. Their value is exp(-log-likelihood per unit).
PERPLEXITIES = {"word_perplexity": "word", "byte_perplexity": "byte"}
# The metrics that are counted in nats, and per what: losses, and the perplexities by their logarithms.
UNITS = {"nll_per_token": "token", "nll_per_answer": "answer", **PERPLEXITIES}


def fields_of(row: Benchmark, items: Sequence[Any], value: float, stderr: float, settings: dict[str, Any]) -> Result:
    """The fields that the results of all benchmarks have."""
    named = {name: getattr(row, name) for name in ("column", "task", "metric", "filter")}
    named |= {"value": value, "stderr": stderr, "n": len(items), "chance": row.chance, "beside": row.beside}
    return {**named, "items": items, "settings": settings, "settings_sha256": json_sha256(settings)}


def read_results(path: Path) -> list[Result]:
    """The results in one model's file.

    Raises:
        BadInputError: the file is missing or holds something else.
    """
    try:
        results = parse(read_input(path, _MAX_RESULTS), measured=True)
        if not are_sound(results) or not all(_is_named(result) for result in results):
            raise ValueError("no results")
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise BadInputError(
            f"{path} is not a result file of fcsd eval",
            "It was changed or damaged: move it away, and evaluate the model again.",
        ) from error
    return results


def _is_named(result: Result) -> bool:
    """Whether the fields of a result that name things have their types."""
    texts = all(isinstance(result.get(key), str) for key in ("model", "column", "metric"))
    answers = result.get("answers")
    if answers is not None:
        fields = ("n", "tokens", "unended")
        texts &= isinstance(answers, dict) and all(is_number(answers.get(field)) for field in fields)
    return texts and isinstance(result.get("settings", {}), dict) and isinstance(result.get("engine", {}), dict)


def are_sound(results: Any) -> bool:
    """Whether a value is a list of results whose numbers are finite; the error of a single question is NaN."""
    needed = {"column", "metric", "value", "stderr", "n", "items"}
    return isinstance(results, list) and all(
        isinstance(result, dict)
        and needed <= result.keys()
        and is_number(result["value"])
        and (result["n"] == 1 or is_number(result["stderr"]))
        and isinstance(result["items"], list | tuple)
        and len(result["items"]) == result["n"]
        and all(is_number(x) for item in result["items"] for x in (item if isinstance(item, list | tuple) else [item]))
        for result in results
    )


def read_directory(directory: Path) -> list[Result]:
    """The results of all models in a directory that ``fcsd eval --out`` wrote; none where it does not exist.

    Raises:
        BadInputError: a JSON file there is neither a result file nor ``comparison.json``.
    """
    files = sorted(file for file in directory.glob("*.json") if file.name != COMPARISON)
    return [result for file in files for result in read_results(file)]


def run_of(model: str) -> Path | None:
    """The run directory that a model directory lies in; None if it lies in none, or is not a directory here.

    A run's scores belong into its folder ``eval``, from which ``fcsd export`` takes the scores of the model card.
    """
    path = Path(model).resolve()
    if not path.is_dir():
        return None
    return next((parent for parent in path.parents if (parent / RUN_RECIPE).is_file()), None)


def is_accuracy(result: Result) -> bool:
    """Whether the value is a fraction, shown in points; otherwise it is a loss or a perplexity."""
    return result["metric"] not in UNITS


def in_mean(result: Result) -> bool:
    """Whether a benchmark counts in the mean, if the baseline is above chance on it."""
    return is_accuracy(result) and not result.get("beside", False)  # files of earlier versions do not know the field


def is_quantised(result: Result) -> bool:
    """Whether the score was taken under quantised communication, simulated or between ranks: it is not the model's."""
    reduce = result.get("engine", {}).get("reduce", "")  # of fcsd's own engine
    # `wire` names simulated formats in the results of studies.formats.scores, and in those of earlier versions.
    return result.get("wire") is not None or reduce.startswith("quantised:")


def shown(result: Result) -> tuple[str, str]:
    """The value and its standard error, formatted for a table."""
    if is_accuracy(result):
        return f"{100 * result['value']:.1f}", f"{100 * result['stderr']:.1f}"
    return f"{result['value']:.3f}", f"{result['stderr']:.3f}"


def shown_answers(result: Result) -> str:
    """How long the generated answers are, and how many do not end; empty where none were generated or it is not known.

    Results of earlier versions do not know it.
    """
    answers = result.get("answers")
    if not answers:
        return ""
    return f"{answers['tokens']:.0f} tokens, {100 * answers['unended']:.1f} % without an end"


def write_samples(folder: Path, task: str, samples: Sequence[dict[str, Any]]) -> None:
    """Write the answers to a task, one JSON object per line. Values that JSON does not have are written as text."""
    lines = (printable(json.dumps(sample, ensure_ascii=False, default=str)) + "\n" for sample in samples)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{task}.jsonl", "".join(lines))


class ResultFile:
    """A model's results. A result replaces an earlier one only if task, settings and data are the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known()  # a damaged file is found before anything is scored

    def _known(self) -> list[Result]:
        return read_results(self.path) if self.path.exists() else []

    def add(self, result: Result) -> None:
        """Add or replace a result and write the file anew, with what another process has added to it meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = [other for other in self._known() if _key(other) != _key(result)] + [result]
            write_text(self.path, "[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
        finally:
            os.close(lock)


def _key(result: Result) -> tuple[str | None, ...]:
    keys = ("suite", "column", "settings_sha256", "data_sha256")
    return tuple(result.get(key) for key in keys)
