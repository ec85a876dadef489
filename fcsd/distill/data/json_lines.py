"""Files of JSON lines -> one Arrow file in the cache, a row for each line.

The lines are not parsed here: a reader with types would refuse a whole file because of one row of another type. They
are kept as bytes, so that a line that is not UTF-8 can be told from one that contains the replacement character. No
more than a block and one line of the longest permitted length are in memory at a time.
"""

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import datasets
import pyarrow as pa

from fcsd.errors import BadInputError

LONGEST_LINE = 40_000_000  # bytes; a longer line is left out and costs no memory
COLUMN = "line"

_BLOCK = 1 << 20  # bytes that are read at once
_BATCH = 32 << 20  # bytes of lines that are written at once
_GZIP_MAGIC = b"\x1f\x8b"
_MOST_EXPANSION = 100  # text seldom shrinks more than tenfold; a file beyond this ratio is refused once it is large
_LARGE = 1 << 30  # bytes


def read_json_lines(files: Sequence[Path], cached: Path, max_rows: int | None) -> datasets.Dataset:
    """The lines of some files as a memory-mapped dataset.

    Args:
        cached: the Arrow file in the cache. It is written if it does not exist; its name must depend on the contents
            of ``files`` and on ``max_rows``.
        max_rows: how many lines to read; None for all.

    Returns: one column ``line``: the bytes of each line without its end, or null for a line longer than
        ``LONGEST_LINE``.

    Raises:
        BadInputError: a file is not what its compression says, or expands to more than 100 times its size.
    """
    if not cached.exists():
        lines = (line for path in files for line in _lines(_blocks(path)))
        _write(islice(lines, max_rows), cached)
    return datasets.Dataset.from_file(str(cached))


def _blocks(path: Path) -> Iterator[bytes]:
    """The contents of a file, decompressed if it begins as a gzip file does."""
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
        most = max(_LARGE, _MOST_EXPANSION * path.stat().st_size)
        total = 0
        try:
            while block := stream.read(_BLOCK):
                yield block
                total += len(block)
                if packed and total > most:
                    raise BadInputError(
                        f"{path}: expands to more than {_MOST_EXPANSION} times its size",
                        hint="if the file is what you expect, decompress it first",
                    )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInputError(f"{path}: cannot be read as gzip: {error}") from error


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """The lines of a file without their ends; None for one longer than ``LONGEST_LINE``."""
    begun: list[bytes] = []  # the parts of a line that the last block did not end
    size = 0
    for block in blocks:
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end]) if size + len(end) <= LONGEST_LINE else None
            begun, size = [], 0
        size += len(rest)
        begun = [*begun, rest] if size <= LONGEST_LINE else []
    if size:
        yield b"".join(begun) if size <= LONGEST_LINE else None


def _write(lines: Iterable[bytes | None], cached: Path) -> None:
    """Writes an Arrow file that appears under its name only when it is whole."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix="lines-") as folder:
        begun = Path(folder) / cached.name
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
