"""Opens a source of a recipe as a memory-mapped table of rows, which are not parsed yet.

A row of a JSON lines file is kept as a line, because a reader with types would refuse a whole file because of one row
of another type. The lines are copied into one Arrow file in the cache of ``datasets``. They are kept as bytes, so that
a line that is not UTF-8 can be distinguished from a line that contains the replacement character. A streamed dataset is
written once as JSON lines into that cache, and is read from there afterwards.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError

from fcsd.config import Source
from fcsd.disk import file_sha256, scratch
from fcsd.distill.data.files import choose_files, find_files, is_saved_dataset
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of, translate
from fcsd.input_lines import blocks, lines_of

LONGEST_LINE = 40_000_000  # bytes; a longer line is left out and costs no memory
_EMPTY = hashlib.sha256().hexdigest()
COLUMN = "line"
TOOLS = "tools"  # the column of chats that says which tools the assistant may call, if there is one

_BATCH = 32 << 20  # bytes of lines that are written at once


@dataclass(frozen=True)
class RawTable:
    """The rows of a source.

    Attributes:
        rows: the source's columns, for chats also the column ``tools`` if there is one; or one column ``line`` of JSON
            lines as bytes.
        lines: whether the rows are JSON lines.
        sha256: the SHA-256 of every data file, by its path relative to the folder that contains all of them. For a
            streamed dataset, the SHA-256 of the rows that were read.
        read: how many rows and files are read, as which format, and what is not read.
        files: the SHA-256 of every local data file that is not empty.
        unread: the columns of a table that are not read.
    """

    rows: datasets.Dataset
    lines: bool
    sha256: dict[str, str]
    read: str
    files: frozenset[str]
    unread: tuple[str, ...]


def cache_folder() -> Path:
    """The folder for files that fcsd derives from data files. It lies in the cache, not beside the user's data."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "fcsd"


def digest(value: object) -> str:
    """The SHA-256 of a value as JSON. Parts that JSON cannot express are replaced by ``str`` of them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def open_source(source: Source) -> RawTable:
    """Finds, hashes and opens a source. With ``max_rows``, only the first rows are kept.

    Raises:
        BadInputError: there is no such file, split or column, or a file is not in its format.
        ConfigError: the format cannot be told from the file's name.
        DiskError: the cache of ``datasets`` cannot be written.
    """
    found = choose_files(source)
    kind, files, _ = found
    try:
        sha256 = _hashes(files)
        rows, unread = _open(source, kind, files, sha256)
        if not files:
            sha256 = _hashes([Path(entry["filename"]) for entry in rows.cache_files])
            if source.streaming:
                sha256 = {source.path: digest(list(sha256.values()))}
    except (DatasetGenerationError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        if (known := translate(error, cache_folder().parent)) is not None:  # such as a cache that cannot be written
            raise known from None
        cause = reason_of(error.__cause__ or error)
        raise BadInputError(f"{source.path}: cannot be read as {kind}: {cause}") from error
    if source.max_rows is not None and source.max_rows < len(rows):
        rows = rows.select(range(source.max_rows))
    bound = ", no more by max_rows," if source.max_rows == len(rows) else ""
    of = str(found) if files else f"the split {source.split} of a dataset"
    known = sha256 if files or (is_saved_dataset(source.path) and "[" not in source.split) else {}
    return RawTable(
        rows=rows,
        lines=kind == "jsonl" or source.streaming,
        sha256=sha256,
        read=f"{len(rows):,} rows{bound} from {of}",
        files=frozenset(known.values()) - {_EMPTY},
        unread=unread,
    )


def check_columns(path: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Refuses a source that lacks a column which the recipe names.

    Raises:
        BadInputError: a column is missing; the message names the columns that exist.
    """
    present = list(present)
    for name in wanted:
        if name not in present:
            close = get_close_matches(name, present, n=1)
            raise BadInputError(
                f"{path}: there is no column {name!r}; the columns are {', '.join(present)}",
                hint=f"Did you mean {close[0]!r}?"
                if close
                else "Name a column by `column`, `token_ids`, `messages`, or `prompt` and `response`.",
            )


def _open(
    source: Source, kind: str, files: list[Path], sha256: dict[str, str]
) -> tuple[datasets.Dataset, tuple[str, ...]]:
    """The rows of a source, and the columns of a table that are not read."""
    table: Any
    if kind == "jsonl":
        name = f"lines-{digest([list(sha256.values()), source.max_rows])[:32]}.arrow"
        return read_json_lines(files, cache_folder() / name, source.max_rows), ()
    if kind == "parquet":
        table = datasets.load_dataset(
            "parquet", data_files=list(map(str, files)), split="train", cache_dir=_cache_of(sha256)
        )
    elif source.streaming:
        features = datasets.Features({COLUMN: datasets.Value("binary")})
        return datasets.Dataset.from_generator(
            _stream, features=features, gen_kwargs=_address(source), cache_dir=_cache_of(_local(source))
        ), ()
    elif is_saved_dataset(source.path):
        table = datasets.load_from_disk(source.path)
        if isinstance(table, datasets.DatasetDict):
            if source.split not in table:
                raise BadInputError(
                    f"{source.path}: there is no split {source.split!r}; the splits are {', '.join(map(str, table))}"
                )
            table = table[source.split]
    else:
        table = datasets.load_dataset(
            source.path,
            source.subset,
            split=source.split,
            revision=source.revision,
            cache_dir=_cache_of(_local(source)),
        )
    check_columns(source.path, source.columns, table.column_names)
    read = [*source.columns, *([TOOLS] if source.chat and TOOLS in table.column_names else [])]
    return table.select_columns(read), tuple(name for name in table.column_names if name not in read)


def _local(source: Source) -> dict[str, str]:
    """The hashes of the files of a dataset that is a folder here; none for one of the hub, which has revisions."""
    return _hashes(find_files(source.path)) if Path(source.path).is_dir() else {}


def _cache_of(sha256: dict[str, str]) -> str:
    """A folder of the cache that belongs to files of these hashes; without files, the usual one of ``datasets``.

    ``datasets`` itself takes a file for unchanged whose path and time of modification are.
    """
    return str(cache_folder() / f"files-{digest(sha256)[:32]}" if sha256 else cache_folder().parent)


def _address(source: Source) -> dict[str, Any]:
    """The fields that identify a streamed dataset. ``datasets`` reads a dataset with the same fields only once."""
    fields = ("path", "subset", "split", "revision", "columns", "max_rows")
    return {name: getattr(source, name) for name in fields} | ({"whole": True} if source.chat else {})


def _stream(
    path: str,
    subset: str | None,
    split: str,
    revision: str | None,
    columns: tuple[str, ...],
    max_rows: int,
    whole: bool = False,
) -> Iterator[dict[str, bytes]]:
    """The first rows of a dataset as JSON lines. They are read over the network without fetching whole files."""
    stream: Any = datasets.load_dataset(path, subset, split=split, revision=revision, streaming=True)
    for number, row in enumerate(islice(stream, max_rows)):
        if number == 0:
            check_columns(path, columns, row)
        # A value that JSON cannot express, such as an image, becomes null, because it cannot be used as text.
        kept = {name: value for name, value in row.items() if whole or name in columns}
        line = json.dumps(kept, default=lambda _: None)
        yield {COLUMN: line.encode()}


def _hashes(files: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its path relative to the folder that contains all of them."""
    if not files:
        return {}
    folder = os.path.commonpath([path.absolute().parent for path in files])
    return {os.path.relpath(path.absolute(), folder): file_sha256(path) for path in files}


def read_json_lines(files: Sequence[Path], cached: Path, max_rows: int | None) -> datasets.Dataset:
    """The lines of some files as a memory-mapped dataset. At most one block and one line of them are in memory.

    Args:
        cached: the Arrow file in the cache. It is written if it does not exist; its name must depend on the contents
            of ``files`` and on ``max_rows``.
        max_rows: the number of lines to read; None stands for all.

    Returns: a dataset with one column ``line``, which holds the bytes of each line without its line end, or null for a
        line longer than ``LONGEST_LINE``.

    Raises:
        BadInputError: a file is damaged gzip, or expands to more than 100 times its size.
    """
    if not cached.exists():
        lines = (line for path in files for line in lines_of(blocks(path), LONGEST_LINE))
        _write(islice(lines, max_rows), cached)
    return datasets.Dataset.from_file(str(cached))


def _write(lines: Iterable[bytes | None], cached: Path) -> None:
    """Writes an Arrow file, which appears under its name only when it is complete."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with scratch(cached.parent, "lines-") as folder:
        begun = folder / cached.name
        schema = pa.schema([(COLUMN, pa.binary())])
        with pa.OSFile(str(begun), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in _batches(lines):
                writer.write_batch(pa.record_batch([pa.array(batch, pa.binary())], schema=schema))
        os.replace(begun, cached)


def _batches(lines: Iterable[bytes | None]) -> Iterator[list[bytes | None]]:
    """Lists of lines of about ``_BATCH`` bytes each."""
    batch: list[bytes | None] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line or b"") + 8
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
