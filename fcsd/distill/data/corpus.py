"""Makes documents of token ids from a source, and marks the tokens that count in the loss.

In a plain text every token counts, including the token at its end. The rendering of a chat is tokenised as it is, and
no token is added to it.

A source is tokenised once and memory-mapped from the cache of ``datasets``. A row that cannot be used is left out, and
such rows are counted by reason. A source without a single usable row is an error.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from fcsd.checkpoint.tokenizer import LimitedProcess, LimitExceededError, document_ids, tokens_before
from fcsd.checkpoint.tokenizer import load_tokenizer as any_tokenizer
from fcsd.config import Source
from fcsd.disk import naming
from fcsd.distill.data.chat_template import Rendered, Rendering, Templates, read_templates, render_chat
from fcsd.distill.data.examples import Chat, Skip, chat_of, row_of_line, text_of, token_ids_of
from fcsd.distill.data.files import measured_and_trained
from fcsd.distill.data.raw_table import COLUMN, TOOLS, RawTable, cache_folder, digest, open_source
from fcsd.errors import BadInputError

_VERSION = 4  # version of the cached tokens; raise it when the way in which text or chats become tokens changes
_ROWS_PER_PROCESS = 20_000
_HOPELESS = 3  # the run ends if a template exceeds its limits on this many chats before it has rendered one
_FEATURES = {
    "ids": datasets.List(datasets.Value("int32")),
    "counts": datasets.List(datasets.Value("bool")),
    "skipped": datasets.Value("string"),
    "unread": datasets.List(datasets.Value("string")),
}


class Document(NamedTuple):
    """A document as tokens.

    Attributes:
        ids: the token ids.
        counts: for each token, whether it counts in the loss.
    """

    ids: list[int]
    counts: list[bool]


class TokenSlices:
    """The token ids of each document, and which of them count, in slices of the memory-mapped Arrow buffers.

    ``datasets`` needs 0.8 ms to format one document. Slicing the buffers takes microseconds and reads only the memory
    pages of that document.

    Args:
        table: has the columns ``ids``, a list of int32 for each document, and ``counts``, a list of as many booleans.
    """

    def __init__(self, table: datasets.Dataset) -> None:
        ids, self._column = table.data.column("ids"), table.data.column("counts")
        self._ids = [_Lists(chunk) for chunk in ids.chunks]
        self._counts = [_Lists(chunk) for chunk in self._column.chunks]
        self._starts = np.cumsum([0, *map(len, ids.chunks)])

    def counted(self) -> int:
        """The number of tokens that count in the loss, over all documents."""
        return pc.call_function("sum", [pc.call_function("list_flatten", [self._column])]).as_py()

    def piece(self, number: int, first: int, last: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The tokens ``first`` to ``last`` (exclusive; None stands for the end) of a document.

        Returns: the token ids, int32, which may be a view of the file, and which of them count, bool; both
            ``[last - first]``.
        """
        chunk = int(np.searchsorted(self._starts, number, side="right")) - 1
        place = number - int(self._starts[chunk])
        return self._ids[chunk].numbers(place, first, last), self._counts[chunk].flags(place, first, last)


class _Lists:
    """One chunk of a column of lists: the offset of each list among the values, and the buffer of the values."""

    def __init__(self, chunk: pa.ListArray) -> None:
        self._ends = chunk.offsets.to_numpy()
        self._values = chunk.values
        self._buffer = np.frombuffer(self._values.buffers()[1] or b"", dtype=np.uint8)

    def _span(self, place: int, first: int, last: int | None) -> tuple[int, int]:
        """The first value and the end (exclusive) of a part of a list, counted in values of the buffer."""
        start, end = self._values.offset + int(self._ends[place]), self._values.offset + int(self._ends[place + 1])
        return start + first, end if last is None else start + last

    def numbers(self, place: int, first: int, last: int | None) -> np.ndarray:
        """Part of a list of int32."""
        start, end = self._span(place, first, last)
        return self._buffer[4 * start : 4 * end].view(np.int32)

    def flags(self, place: int, first: int, last: int | None) -> np.ndarray:
        """Part of a list of booleans, which Arrow packs eight to a byte, the first in the lowest bit."""
        start, end = self._span(place, first, last)
        bits = np.unpackbits(self._buffer[start // 8 : -(-end // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + end - start].view(np.bool_)


@dataclass(frozen=True)
class Corpus:
    """One tokenised source.

    Attributes:
        name: the path of the source in the recipe.
        lengths: ``[documents]`` int64, the number of tokens of each document; 0 stands for a row that was left out.
        sha256: the SHA-256 of every data file by its name, of the tokenizer and of the chat template. For chats also
            that of ``lengths``, which differs between two hosts if the template exceeded its limits on different chats.
        skipped: the number of rows of the source that were left out, by reason.
        read: how many rows and files were read, as which format, and what was not read.
        files: the SHA-256 of every local data file that is not empty.
        unread: the fields of chats that nothing reads, and of how many rows or messages.
        overlong: what happens to a document that is longer than a row: ``split``, ``truncate`` or ``skip``.
        padding: the token id that fills the rest of a row.
        min_counted: the smallest share of the tokens in its rows that must count in the loss.
    """

    name: str
    lengths: np.ndarray
    sha256: dict[str, str]
    skipped: dict[str, int]
    overlong: str
    padding: int
    _documents: TokenSlices
    min_counted: float = 0.0
    unread: dict[str, int] = field(default_factory=dict)
    read: str = ""
    files: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def counted(self) -> int:
        """The number of tokens that count in the loss."""
        return self._documents.counted()

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of a document and which of them count, both ``[lengths[number]]``, int32 and bool."""
        return self.piece(number, 0, None)

    def piece(self, number: int, first: int, last: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Like ``document``, but only the tokens ``first`` to ``last`` (exclusive; None stands for the end)."""
        return self._documents.piece(number, first, last)

    def left_out(self, seq_len: int) -> dict[str, int]:
        """The number of documents that a run with rows of ``seq_len`` tokens leaves out or cuts, by reason."""
        overlong = int((self.lengths > seq_len).sum())
        if self.overlong == "split" or overlong == 0:
            return self.skipped
        return self.skipped | {f"{'cut to' if self.overlong == 'truncate' else 'over'} {seq_len:,} tokens": overlong}


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory.

    Raises:
        BadInputError: there is no tokenizer, it is not a fast tokenizer, or it has no EOS token.
    """
    tokenizer = any_tokenizer(model)
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise BadInputError(f"{model}: its tokenizer must be a fast one (tokenizer.json) and have an EOS token")
    return tokenizer


def load_corpus(source: Source, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end: int | None = None) -> Corpus:
    """Reads and tokenises a source.

    Args:
        vocab_size: the vocabulary size of the model; a row with a token id of this size or larger is left out.
        end: the token that ends a plain text; see ``fcsd.distill.data.of_run``. None is the tokenizer's EOS.

    Raises:
        BadInputError: there is no such file, split, column or chat template; a file is not in its format; no row can be
            used; the chat template exceeds its limits on every chat.
        ConfigError: the format cannot be told from the name, or the chat template's file cannot be read.
    """
    templates = read_templates(source, tokenizer) if source.chat else None
    table = open_source(source)
    backend: Any = tokenizer
    sha256 = table.sha256 | {"tokenizer": digest([backend.backend_tokenizer.to_str(), tokenizer.special_tokens_map])}
    if templates is not None:
        sha256["chat template"] = digest(templates.plain if len(set(templates)) == 1 else templates)
    ending: int = backend.eos_token_id if end is None else end
    if source.plain and ending != backend.eos_token_id:
        sha256["end of a document"] = str(ending)
    columns = [COLUMN] if table.lines else table.rows.column_names
    chats = (source.message_keys, source.train_on, source.earlier_reasoning)
    read = [source.columns, chats, source.max_rows, table.lines, vocab_size, *(["ids"] if source.token_ids else [])]
    fingerprint = digest([_VERSION, sha256, *read])[:32]
    with naming(cache_folder()):
        cache_folder().mkdir(parents=True, exist_ok=True)
        encoded = table.rows.map(
            partial(
                _encode,
                source=source,
                lines=table.lines,
                columns=columns,
                tokenizer=tokenizer,
                templates=templates,
                end=ending,
                limit=vocab_size,
            ),
            input_columns=columns,
            remove_columns=columns,
            batched=True,
            num_proc=_processes(len(table.rows)),
            features=datasets.Features(_FEATURES),
            cache_file_name=str(cache_folder() / f"{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
            desc=f"tokenising {source.path}",
        )
    lengths = pc.call_function("list_value_length", [encoded.data.column("ids")]).to_numpy().astype(np.int64)
    if templates is not None:  # a template may exceed its limits on one host only
        sha256["documents"] = hashlib.sha256(lengths.tobytes()).hexdigest()
    reasons = encoded.data.column("skipped").drop_null().value_counts().to_pylist()
    skipped = {entry["values"]: entry["counts"] for entry in reasons}
    if not lengths.any():
        raise BadInputError(f"{source.path}: no usable row: {listed(skipped)}", hint=_fields_of(table, source))
    return Corpus(
        name=source.path,
        lengths=lengths,
        sha256=sha256,
        skipped=skipped,
        overlong={"auto": "truncate" if source.chat else "split"}.get(source.overlong, source.overlong),
        padding=backend.eos_token_id,
        _documents=TokenSlices(encoded),
        min_counted=source.min_counted,
        unread=_fields_unread(encoded, table) if source.chat else {},
        read=table.read,
        files=table.files,
    )


def require_other_text(trained: Sequence[Corpus], measured: Mapping[str, Corpus]) -> None:
    """Refuses a file to measure on whose content is that of a training file, such as a copy of it.

    Args:
        measured: the corpora that are only measured on, by the field of ``data`` that names them.

    Raises:
        BadInputError: there is such a file.
    """
    for name, held_out in measured.items():
        for corpus in trained:
            if same := held_out.files & corpus.files:
                names = [file for file, sha in corpus.sha256.items() if sha in same]
                raise measured_and_trained(name, held_out.name, f"{names[0]} of {corpus.name}")


def listed(reasons: Mapping[str, int], most: int = 8) -> str:
    """The most frequent reasons with their counts, in one line."""
    common = sorted(reasons.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in common[most:])
    return ", ".join([f"{count:,} {reason}" for reason, count in common[:most]] + [f"{rest:,} others"] * (rest > 0))


def _fields_unread(encoded: datasets.Dataset, table: RawTable) -> dict[str, int]:
    """The fields that nothing reads, with the number of rows or messages that have them."""
    flat = pc.call_function("list_flatten", [encoded.data.column("unread")])
    found = {entry["values"]: entry["counts"] for entry in flat.value_counts().to_pylist()}
    return found | {f"{name!r} of rows": len(table.rows) for name in table.unread}


def _encode(
    *batch: list[Any],
    source: Source,
    lines: bool,
    columns: list[str],
    tokenizer: PreTrainedTokenizerBase,
    templates: Templates | None,
    end: int,
    limit: int,
) -> dict[str, list[Any]]:
    """The tokenised documents of a batch of rows. A row that cannot be used gives an empty document and the reason."""
    encoded: dict[str, list[Any]] = {name: [] for name in _FEATURES}
    special_tokens, known = dict(tokenizer.special_tokens_map), set[tuple[object, ...]]()
    render = partial(
        render_chat, templates=templates or Templates("", ""), special_tokens=special_tokens, source=source, known=known
    )
    before = tokens_before(tokenizer)
    with LimitedProcess(render) as limited:
        for values in zip(*batch, strict=True):
            reason, unread = None, list[str]()
            try:
                row = row_of_line(values[0], source.columns) if lines else dict(zip(columns, values, strict=True))
                if source.token_ids is not None:
                    ids = token_ids_of(row, source.token_ids)
                    documents = [Document(ids, [True] * len(ids))]
                elif templates is None:
                    documents = [encode_text(text_of(row, source), tokenizer, before, end)]
                else:
                    renderings, unread = _rendered(
                        chat_of(row, source, of_table=not lines or source.streaming), limited, source
                    )
                    documents = [encode_rendering(rendering, tokenizer) for rendering in renderings]
                    unread = unread + [f"{name!r} of rows" for name in row if name not in (*source.columns, TOOLS)]
                if max(max(document.ids, default=0) for document in documents) >= limit:
                    raise Skip("outside the vocabulary")
            except Skip as skip:
                documents, reason, unread = [Document([], [])], str(skip), []
            for number, document in enumerate(documents):
                for name, value in zip(encoded, (*document, reason, [] if number else unread), strict=True):
                    encoded[name].append(value)
    return encoded


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, before: Sequence[int], end: int) -> Document:
    """The tokens of a plain text, with one ``end`` at its end. All of them count.

    Args:
        before: the special tokens that the tokenizer puts before a text; see ``tokens_before``.
        end: the token that ends a document; see ``fcsd.distill.data.of_run``.
    """
    ids = document_ids(text, tokenizer, before, end)
    return Document(ids, [True] * len(ids))


def encode_rendering(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> Document:
    """The tokens of a rendered chat. A token counts if it begins inside a span that counts."""
    encoded: Any = tokenizer(rendering.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
    borders = np.array(rendering.spans, dtype=np.int64).ravel()  # ascending: begin and end of each span
    counts = np.searchsorted(borders, starts, side="right") % 2 == 1
    return Document(encoded["input_ids"], counts.tolist())


def _rendered(chat: Chat, render: LimitedProcess, source: Source) -> Rendered:
    """The texts of a chat, and its fields that the template does not read.

    Raises:
        Skip: the template cannot render the chat.
        BadInputError: the template exceeded its limits on each of the first chats, and so probably on all others.
    """
    try:
        found = render(chat)
    except LimitExceededError as error:
        if render.stopped >= _HOPELESS and not render.answered:
            raise BadInputError(
                f"{source.path}: the chat template {error} on each of {render.stopped} chats",
                hint="name another Jinja file with `chat_template:`",
            ) from error
        raise Skip(f"the chat template {error}") from error
    if isinstance(found, str):
        raise Skip(found)
    return found


def _processes(rows: int) -> int | None:
    """The number of processes that tokenise; None stands for this process alone."""
    count = min(len(os.sched_getaffinity(0)), rows // _ROWS_PER_PROCESS)
    return count if count > 1 else None


def _fields_of(table: RawTable, source: Source) -> str | None:
    """A hint that names the fields of the first JSON object of a source; None if there is no JSON object."""
    for line in table.rows[:100][COLUMN] if table.lines else ():
        try:
            row = json.loads(line or b"")
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            close = [match for name in source.columns for match in get_close_matches(name, row, n=1)]
            guess = f"; did you mean {close[0]!r}?" if close and close[0] not in source.columns else ""
            return f"the first row has {', '.join(map(repr, list(row)[:20]))}{guess}"
    return None
