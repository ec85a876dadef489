"""A source of a recipe -> its rows as a memory-mapped table, wherever they come from.

Lines of JSON stay lines: one row of another type would make a typed reader refuse the whole file. What is streamed
is written down as such lines once, in the cache of ``datasets``, and read from there ever after.
"""

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError

from fcsd.config import Source
from fcsd.errors import BadInputError, ConfigError

_ENDINGS = {"jsonl": (".jsonl", ".ndjson", ".jsonl.gz"), "parquet": (".parquet",)}


@dataclass(frozen=True)
class Table:
    """The rows of a source.

    Attributes:
        rows: the source's columns, or one column of JSON lines.
        lines: whether it is lines.
        sha256: of every data file by its name; of a stream, of what it gave.
    """

    rows: datasets.Dataset
    lines: bool
    sha256: dict[str, str]


def open_source(source: Source) -> Table:
    """Finds, reads and hashes a source, the first ``max_rows`` rows of it.

    Raises:
        BadInputError: no such file, split or column; unreadable as its format.
        ConfigError: the format cannot be told from the name.
    """
    kind, files = _find(source)
    try:
        rows = _open(source, kind, files)
    except (DatasetGenerationError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        if isinstance(error.__cause__, BadInputError):
            raise error.__cause__ from None
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise BadInputError(f"{source.path}: cannot be read as {kind}: {cause}") from error
    cached = [Path(entry["filename"]) for entry in rows.cache_files]
    sha256 = {source.path if source.streaming else path.name: _sha256(path) for path in files or cached}
    if source.max_rows is not None and source.max_rows < len(rows):
        rows = rows.select(range(source.max_rows))
    return Table(rows, kind == "jsonl" or source.streaming, sha256)


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


def _open(source: Source, kind: str, files: list[Path]) -> datasets.Dataset:
    names = [str(name) for name in files]
    table: Any
    if kind == "jsonl":
        return datasets.load_dataset("text", data_files=names, split="train", encoding_errors="replace")
    if kind == "parquet":
        table = datasets.load_dataset("parquet", data_files=names, split="train")
    elif source.streaming:
        text = datasets.Features(text=datasets.Value("string"))
        return datasets.Dataset.from_generator(_stream, features=text, gen_kwargs=_address(source))
    elif (Path(source.path) / "state.json").exists() or (Path(source.path) / "dataset_dict.json").exists():
        table = datasets.load_from_disk(source.path)
        if isinstance(table, datasets.DatasetDict):
            if source.split not in table:
                raise BadInputError(f"{source.path}: no split {source.split!r}, only {', '.join(map(str, table))}")
            table = table[source.split]
    else:
        table = datasets.load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    check_columns(source.path, source.columns, table.column_names)
    return table.select_columns(list(source.columns))


def _address(source: Source) -> dict[str, Any]:
    """What is streamed: the same address is streamed once."""
    fields = ("path", "subset", "split", "revision", "columns", "max_rows")
    return {name: getattr(source, name) for name in fields}


def _stream(
    path: str, subset: str | None, split: str, revision: str | None, columns: tuple[str, ...], max_rows: int
) -> Iterator[dict[str, str]]:
    """The first rows of a dataset as JSON lines; the files behind them are not fetched."""
    stream: Any = datasets.load_dataset(path, subset, split=split, revision=revision, streaming=True)
    for number, row in enumerate(islice(stream, max_rows)):
        if number == 0:
            check_columns(path, columns, row)
        # What JSON cannot say is not text either.
        yield {"text": json.dumps({name: row[name] for name in columns if name in row}, default=lambda _: None)}


def check_columns(path: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Refuses a source without the columns that are asked of it, and names those it has.

    Raises:
        BadInputError: one is missing.
    """
    present = list(present)
    for name in wanted:
        if name not in present:
            close = get_close_matches(name, present, n=1)
            raise BadInputError(
                f"{path}: no column {name!r}, only {', '.join(present)}",
                hint=f"did you mean {close[0]!r}?" if close else "column, messages, or prompt and response say which",
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
