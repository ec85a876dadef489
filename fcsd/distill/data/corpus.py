"""A source of text or chats -> its documents as tokens, and which of these count in the loss.

Tokenised once and memory-mapped from the ``datasets`` cache. A row that cannot be used is counted under its
reason and left out; a source without a single usable row is an error.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import numpy as np
import pyarrow.compute as pc
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fcsd.config import Source
from fcsd.distill.data.documents import Documents
from fcsd.distill.data.records import Skip, chat_of, row_of_line, text_of
from fcsd.distill.data.render import encode_chat, encode_text, read_template
from fcsd.distill.data.tables import Table, open_source
from fcsd.errors import BadInputError

_VERSION = 1  # of what is cached below
_ROWS_PER_PROCESS = 20_000
_FEATURES = {
    "ids": datasets.List(datasets.Value("int32")),
    "counts": datasets.List(datasets.Value("bool")),
    "skipped": datasets.Value("string"),
}


@dataclass(frozen=True)
class Corpus:
    """One tokenised source.

    Attributes:
        name: its path in the recipe.
        lengths: ``[documents]`` int64, the tokens of each; 0 for what was skipped.
        sha256: of every data file by its name, of the tokenizer and of the chat template.
        skipped: rows of the source that were left out, by reason.
        overlong: ``split``, ``truncate`` or ``skip``: what becomes of a document that outgrows a row.
        padding: the token id that fills a row up.
    """

    name: str
    lengths: np.ndarray
    sha256: dict[str, str]
    skipped: dict[str, int]
    overlong: str
    padding: int
    _documents: Documents

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def counted(self) -> int:
        """How many of the tokens count in the loss."""
        return self._documents.counted()

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a document, and which of them count: ``[lengths[number]]`` int32 and bool."""
        return self.piece(number, 0, None)

    def piece(self, number: int, first: int, last: int | None) -> tuple[np.ndarray, np.ndarray]:
        """As ``document``, of its tokens ``first`` to ``last`` (exclusive; None for the end) alone."""
        return self._documents.piece(number, first, last)

    def left_out(self, seq_len: int) -> dict[str, int]:
        """What a run with rows of ``seq_len`` tokens does without, by reason."""
        overlong = int((self.lengths > seq_len).sum())
        if self.overlong == "split" or overlong == 0:
            return self.skipped
        return self.skipped | {f"{'cut to' if self.overlong == 'truncate' else 'over'} {seq_len:,} tokens": overlong}


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
        BadInputError: no such file, split, column or chat template; unreadable as its format; no usable row.
        ConfigError: the format cannot be told from the name, or the chat template's file cannot be read.
    """
    template = read_template(source, tokenizer) if source.chat else None
    table = open_source(source)
    backend: Any = tokenizer
    sha256 = table.sha256 | {"tokenizer": _digest([backend.backend_tokenizer.to_str(), tokenizer.special_tokens_map])}
    if template is not None:
        sha256["chat template"] = _digest(template)
    columns = ["text"] if table.lines else list(source.columns)
    shape = (source.columns, source.message_keys, source.train_on, source.max_rows, table.lines, vocab_size)
    fingerprint = _digest([_VERSION, sha256, shape])[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "fcsd"  # never beside the user's data
    cache.mkdir(parents=True, exist_ok=True)
    encoded = table.rows.map(
        partial(_encode, source=source, lines=table.lines, tokenizer=tokenizer, template=template, limit=vocab_size),
        input_columns=columns,
        remove_columns=columns,
        batched=True,
        num_proc=_processes(len(table.rows)),
        features=datasets.Features(_FEATURES),
        cache_file_name=str(cache / f"{fingerprint}.arrow"),
        new_fingerprint=fingerprint,
        desc=f"tokenising {source.path}",
    )
    lengths = pc.call_function("list_value_length", [encoded.data.column("ids")]).to_numpy().astype(np.int64)
    reasons = encoded.data.column("skipped").drop_null().value_counts().to_pylist()
    skipped = {entry["values"]: entry["counts"] for entry in reasons}
    if not lengths.any():
        raise BadInputError(f"{source.path}: no usable row: {listed(skipped)}", hint=_fields_of(table, source))
    overlong = {"auto": "truncate" if source.chat else "split"}.get(source.overlong, source.overlong)
    return Corpus(source.path, lengths, sha256, skipped, overlong, backend.eos_token_id, Documents(encoded))


def listed(reasons: Mapping[str, int], most: int = 8) -> str:
    """The commonest reasons with their counts, in one line."""
    common = sorted(reasons.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in common[most:])
    return ", ".join([f"{count:,} {reason}" for reason, count in common[:most]] + [f"{rest:,} others"] * (rest > 0))


def _encode(
    *columns: list[Any],
    source: Source,
    lines: bool,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    limit: int,
) -> dict[str, list[Any]]:
    """For each row its tokens, or none and the reason."""
    encoded: dict[str, list[Any]] = {name: [] for name in _FEATURES}
    for values in zip(*columns, strict=True):
        try:
            row = row_of_line(values[0], source.columns) if lines else dict(zip(source.columns, values, strict=True))
            if template is None:
                ids, counts = encode_text(text_of(row, source), tokenizer)
            else:
                ids, counts = encode_chat(chat_of(row, source), tokenizer, template, source.train_on)
            if max(ids) >= limit:
                raise Skip("outside the vocabulary")
            result = (ids, counts, None)
        except Skip as skip:
            result = ([], [], str(skip))
        for name, value in zip(encoded, result, strict=True):
            encoded[name].append(value)
    return encoded


def _processes(rows: int) -> int | None:
    """How many processes tokenise; None is this one alone."""
    count = min(len(os.sched_getaffinity(0)), rows // _ROWS_PER_PROCESS)
    return count if count > 1 else None


def _fields_of(table: Table, source: Source) -> str | None:
    """What the first JSON object is made of, for a source none of whose rows could be used."""
    for line in table.rows[:100]["text"] if table.lines else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            close = [match for name in source.columns for match in get_close_matches(name, row, n=1)]
            guess = f"; did you mean {close[0]!r}?" if close and close[0] not in source.columns else ""
            return f"the first row has {', '.join(map(repr, list(row)[:20]))}{guess}"
    return None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
