"""Copies files of JSON lines into one Arrow file in the cache, with a row for each line.

The lines are not parsed here, because a reader with types would refuse a whole file because of one row of another type.
The lines are kept as bytes, so that a line that is not UTF-8 can be distinguished from a line that contains the
replacement character. The reader holds at most one block and one line of the longest permitted length in memory.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa

from fcsd.input_lines import blocks, lines_of

LONGEST_LINE = 40_000_000  # bytes; a longer line is left out and costs no memory
COLUMN = "line"

_BATCH = 32 << 20  # bytes of lines that are written at once


def read_json_lines(files: Sequence[Path], cached: Path, max_rows: int | None) -> datasets.Dataset:
    """The lines of some files as a memory-mapped dataset.

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
