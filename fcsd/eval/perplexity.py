"""Held-out loss: the mean negative log-likelihood per token of documents that no model was trained on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.disk import file_sha256, json_sha256, open_input
from fcsd.errors import BadInputError
from fcsd.eval.statistics import estimate
from fcsd.foreign_errors import reason_of
from fcsd.input_lines import LONGEST_TEXT, MOST_TEXT, read_lines
from fcsd.strict_json import StrictJsonError, parse

if TYPE_CHECKING:
    from fcsd.eval.engines.interface import Adapter

HELD_OUT = "Held-out loss"
COLUMN = "text"  # of a file of documents
KINDS = (".jsonl", ".jsonl.gz", ".parquet")
IDS = "input_ids"  # of a file of documents that are tokenised already, as `fcsd write` leaves them


class HeldOut:
    """A held-out text: its documents, and the files that they came from.

    The path is a file, or a folder with such files. The documents are token ids if the files are ``.parquet`` ones with
    the column ``input_ids`` and without ``text``.

    Raises:
        BadInputError: as ``read_texts``; or a folder has no such file, or has texts and token ids.
    """

    def __init__(self, path: Path) -> None:
        self.files = [path]
        if path.is_dir():
            self.files = sorted(file for file in path.iterdir() if file.name.endswith(KINDS))
            if not self.files:
                raise BadInputError(f"{path}: this folder has no file that ends with {', '.join(KINDS)}")
        parts: list[list[Any]] = [read_texts(file, (COLUMN, IDS)) for file in self.files]
        if len({type(part[0]) for part in parts}) > 1:
            raise BadInputError(f"{path}: some files of this folder have texts, and others token ids", "Part them.")
        self.texts = [document for part in parts for document in part]


def read_texts(path: Path, columns: Sequence[str] = (COLUMN,)) -> list[Any]:
    """The documents in the column ``text`` of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, without empty ones.

    Args:
        columns: of a ``.parquet`` file, the first of these that it has is read; ``input_ids`` holds lists of token ids.

    Raises:
        BadInputError: the file does not exist, is damaged, has another format or no text, or a row lacks the column; or
            a document has more than ``LONGEST_TEXT`` bytes, or all of them more than ``MOST_TEXT``.
    """
    if not path.exists():
        raise BadInputError(f"{path}: there is no such text file")
    if not path.name.endswith(KINDS):
        raise BadInputError(f"{path}: a text file must be .jsonl, .jsonl.gz or .parquet")
    try:
        documents = _of_parquet(path, columns) if path.suffix == ".parquet" else _of_lines(path)
        found = [document for document in documents if document]
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: this text file cannot be read: {reason_of(error)}") from error
    if not found:
        raise BadInputError(f"{path}: this file has no text")
    return found


def _of_parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet

    number = total = 0
    with open_input(path) as source:
        file = pyarrow.parquet.ParquetFile(source)
        names = file.schema_arrow.names
        column = next((column for column in columns if column in names), None)
        if column is None:
            raise BadInputError(f"{path} has no column {COLUMN!r}", f"Its columns are: {', '.join(names)}")
        # A text that repeats is stored once, so a small file can hold much: few rows are expanded at once.
        for batch in file.iter_batches(batch_size=64, columns=[column]):
            for document in batch.column(0).to_pylist():
                number += 1
                if column == IDS:
                    if not isinstance(document, list) or not all(type(one) is int and one >= 0 for one in document):
                        raise BadInputError(f"{path}: {IDS!r} of row {number} is not a list of token ids")
                    size = 4 * len(document)
                else:
                    if not isinstance(document, str | None):
                        raise BadInputError(f"{path}: {COLUMN!r} of row {number} is not a text")
                    size = len((document or "").encode())
                    if size > LONGEST_TEXT:
                        raise BadInputError(f"{path}: row {number} has over {LONGEST_TEXT:,} bytes", "Split it.")
                total += size
                if total > MOST_TEXT:
                    raise BadInputError(f"{path}: holds more than {MOST_TEXT >> 20} MB of text", "Split the file.")
                yield document


def _of_lines(path: Path) -> Iterator[str]:
    # A text may hold U+2028 or U+0085, which ``splitlines`` would take for the end of a line.
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            text = parse(line.decode(), measured=True)[COLUMN]
        except (StrictJsonError, KeyError, TypeError) as error:
            raise BadInputError(f"{path}:{number}: not a JSON object with a {COLUMN!r}") from error
        if not isinstance(text, str):
            raise BadInputError(f"{path}:{number}: {COLUMN!r} is not a text")
        yield text


def held_out_result(text: HeldOut, lm: "Adapter") -> dict[str, Any]:
    """The held-out loss as a result; each item is ``(negative log-likelihood in nats, tokens)`` of a document.

    Documents are read in disjoint windows of the model's length. The perplexity is the exponential of the value.
    """
    items = [(-loglikelihood, tokens) for loglikelihood, tokens in lm.text_loglikelihoods(text.texts)]
    value, stderr = estimate(items)
    settings = {"harness": "fcsd", "task": "held_out", "max_length": lm.max_length, "bos": "not scored"}
    return {
        "column": HELD_OUT,
        "task": "held_out",
        "metric": "nll_per_token",
        "filter": "none",
        "value": value,
        "stderr": stderr,
        "n": len(items),
        "chance": None,
        "beside": True,
        "items": items,
        "settings": settings,
        "settings_sha256": json_sha256(settings),
        "data_sha256": json_sha256(text.texts),
        "data_files": {file.name: file_sha256(file) for file in text.files},
        "sandbox": None,
    }
