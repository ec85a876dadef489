"""Held-out loss: the mean negative log-likelihood per token of documents that no model was trained on."""

import gzip
import json
from pathlib import Path
from typing import Any

from fcsd.disk import file_sha256, json_sha256
from fcsd.errors import BadInputError
from fcsd.eval.engines.interface import Adapter
from fcsd.eval.statistics import estimate

HELD_OUT = "Held-out loss"
COLUMN = "text"  # of a file of documents


class HeldOut:
    """A held-out text: its documents, and the file that they came from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts = read_texts(path)


def read_texts(path: Path) -> list[str]:
    """The documents in the column ``text`` of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, without empty ones.

    Raises:
        BadInputError: the file does not exist, has another format, has a row without the column, or has no text.
    """
    if not path.is_file():
        raise BadInputError(f"held-out text {path} does not exist")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        if COLUMN not in table.column_names:
            raise BadInputError(f"{path} has no column {COLUMN!r}", f"Its columns are: {', '.join(table.column_names)}")
        texts = table[COLUMN].to_pylist()
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
        texts = [_text(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        raise BadInputError(f"held-out text {path} is neither .jsonl, .jsonl.gz nor .parquet")
    texts = [text for text in texts if text]
    if not texts:
        raise BadInputError(f"held-out text {path} is empty")
    return texts


def _text(line: str, number: int, path: Path) -> str:
    try:
        text = json.loads(line)[COLUMN]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInputError(f"{path}:{number}: not a JSON object with a {COLUMN!r}") from error
    if not isinstance(text, str):
        raise BadInputError(f"{path}:{number}: {COLUMN!r} is not a text")
    return text


def held_out_result(text: HeldOut, lm: Adapter) -> dict[str, Any]:
    """The held-out loss as a result; each item is ``(negative log-likelihood in nats, tokens)`` of a document.

    Documents are read in disjoint windows of the model's length. The perplexity is the exponential of the value.
    """
    items = [(-loglikelihood, tokens) for loglikelihood, tokens in lm.text_loglikelihoods(text.texts)]
    value, stderr = estimate(items)
    settings = {"harness": "fcsd", "task": "held_out", "max_length": lm.max_length}
    return {
        "column": HELD_OUT,
        "task": "held_out",
        "metric": "nll_per_token",
        "filter": "none",
        "value": value,
        "stderr": stderr,
        "n": len(items),
        "chance": None,
        "items": items,
        "settings": settings,
        "settings_sha256": json_sha256(settings),
        "data_sha256": json_sha256(text.texts),
        "data_files": {text.path.name: file_sha256(text.path)},
        "sandbox": None,
    }
