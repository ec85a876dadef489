"""A source of text on disk -> its documents as tokens, EOS after each.

Tokenised once and memory-mapped from the ``datasets`` cache. A row that cannot be used is counted under its
reason and left out; a source without a single usable row is an error.
"""

import glob
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.exceptions import DatasetGenerationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fcsd.config import Source
from fcsd.errors import BadInputError, ConfigError

_ENDINGS = {"jsonl": (".jsonl", ".ndjson", ".jsonl.gz"), "parquet": (".parquet",)}

# one value of the source -> its text; raises _Skip
Reader = Callable[[Any], str]


@dataclass(frozen=True)
class Corpus:
    """One tokenised source.

    Attributes:
        lengths: ``[documents]`` int64, the tokens of each, EOS included; 0 for what was skipped.
        files: sha256 of every data file by its name.
        skipped: rows of the source that were left out, by reason.
    """

    lengths: np.ndarray
    files: dict[str, str]
    skipped: dict[str, int]
    _documents: datasets.Dataset

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def document(self, number: int) -> np.ndarray:
        """Token ids of a document, ``[lengths[number]]``."""
        return self._documents[number]["ids"]


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory.

    Raises:
        BadInputError: there is none, or it cannot end a document.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{model}: no usable tokenizer: {str(error).strip().splitlines()[0]}") from error
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise BadInputError(f"{model}: needs a fast tokenizer with an EOS token")
    return tokenizer


def load_corpus(source: Source, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Corpus:
    """Reads and tokenises a source.

    Args:
        vocab_size: of the model; a row with a token id at or above it is skipped.

    Raises:
        BadInputError: no such file, split or column; unreadable as its format; no usable row.
        ConfigError: the format cannot be told from the name.
    """
    kind, files = _find(source)
    try:
        raw, read = _open(source, kind, files)
    except (DatasetGenerationError, pa.ArrowException, OSError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise BadInputError(f"{source.path}: cannot be read as {kind}: {cause}") from error
    hashes = {path.name: _sha256(path) for path in files or [Path(x["filename"]) for x in raw.cache_files]}
    backend: Any = tokenizer
    identity = [
        hashes,
        kind,
        source.column,
        vocab_size,
        tokenizer.eos_token_id,
        backend.backend_tokenizer.to_str(),
    ]
    encoded = raw.map(
        partial(_encode, read=read, tokenizer=tokenizer, vocab_size=vocab_size),
        input_columns=raw.column_names,
        remove_columns=raw.column_names,
        batched=True,
        features=datasets.Features(ids=datasets.List(datasets.Value("int32")), skipped=datasets.Value("string")),
        new_fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32],
        desc=f"tokenising {source.path}",
    )
    lengths = pc.call_function("list_value_length", [encoded.data.column("ids")]).to_numpy().astype(np.int64)
    reasons = encoded.data.column("skipped").drop_null().value_counts().to_pylist()
    skipped = {entry["values"]: entry["counts"] for entry in reasons}
    if not lengths.any():
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise BadInputError(f"{source.path}: no usable row: {why}")
    return Corpus(lengths, hashes, skipped, encoded.with_format("numpy"))


def _find(source: Source) -> tuple[str, list[Path]]:
    """The format of a source and its files; none for a dataset that ``datasets`` locates itself."""
    path = Path(source.path)
    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if source.format == "hf" or (source.format == "auto" and saved):
        return "hf", []
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(source.path, recursive=True))
    files = sorted(name for name in found if name.is_file())
    if not files:
        raise BadInputError(f"{source.path}: no such data file", hint="a dataset of the hub needs format: hf")
    if not any(name.stat().st_size for name in files):
        raise BadInputError(f"{source.path}: is empty")
    if source.format != "auto":
        return source.format, files
    for kind, endings in _ENDINGS.items():
        matching = [name for name in files if name.name.endswith(endings)]
        if matching:
            return kind, matching
    raise ConfigError(f"{source.path}: the format cannot be told from the name", hint="set `format:` beside it")


def _open(source: Source, kind: str, files: list[Path]) -> tuple[datasets.Dataset, Reader]:
    """A dataset of one column, and what takes the text from each of its values."""
    names = [str(name) for name in files]
    if kind == "jsonl":
        # As plain lines: one row of another type would make the JSON reader refuse the whole file.
        lines = datasets.load_dataset("text", data_files=names, split="train", encoding_errors="replace")
        return lines, partial(_text_of_line, column=source.column)
    table: Any
    if kind == "parquet":
        table = datasets.load_dataset("parquet", data_files=names, split="train")
    elif Path(source.path).is_dir():
        table = datasets.load_from_disk(source.path)
        if isinstance(table, datasets.DatasetDict):
            if source.split not in table:
                raise BadInputError(f"{source.path}: no split {source.split!r}, only {', '.join(map(str, table))}")
            table = table[source.split]
    else:
        table = datasets.load_dataset(source.path, split=source.split)
    if source.column not in table.column_names:
        raise BadInputError(f"{source.path}: no column {source.column!r}, only {', '.join(table.column_names)}")
    return table.select_columns([source.column]), _text


class _Skip(Exception):
    """This row cannot be used; the message is the reason it is counted under."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Skip("not text")
    if not value.strip():
        raise _Skip("empty")
    return value


def _text_of_line(line: str, *, column: str) -> str:
    if not line.strip():
        raise _Skip("empty")
    if "\ufffd" in line:  # what the reader puts in place of bytes that are not UTF-8
        raise _Skip("not UTF-8")
    try:
        row = json.loads(line)
    except ValueError:
        raise _Skip("not JSON") from None
    if not isinstance(row, dict) or column not in row:
        raise _Skip(f"without {column!r}")
    return _text(row[column])


def _encode(
    values: list[Any], *, read: Reader, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> dict[str, list[Any]]:
    """For each value its tokens, or none and the reason."""
    texts: list[str] = []
    reasons: list[str | None] = []
    for value in values:
        try:
            text, reason = read(value), None
        except _Skip as skip:
            text, reason = "", str(skip)
        texts.append(text)
        reasons.append(reason)
    ids: list[list[int]] = []
    for number, tokens in enumerate(tokenizer(texts, verbose=False)["input_ids"]):  # type: ignore[arg-type]
        if reasons[number] is None and max(tokens, default=0) >= vocab_size:
            reasons[number] = "outside the vocabulary"
        ids.append([*tokens, tokenizer.eos_token_id] if reasons[number] is None else [])  # type: ignore[misc]
    return {"ids": ids, "skipped": reasons}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
