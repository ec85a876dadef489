"""Reads the lines of text files that a user brought, plain or gzip, and holds no line that is too long in memory."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from fcsd.disk import open_input
from fcsd.errors import BadInputError

LONGEST_TEXT = 10_000_000  # bytes of a line that becomes the input of a model or a question of a benchmark
MOST_TEXT = 1 << 30  # bytes of a file that is held in memory, decompressed

_BLOCK = 1 << 20  # bytes that are read at once
_GZIP_MAGIC = b"\x1f\x8b"
_MOST_EXPANSION = 100  # text rarely compresses more than tenfold; a large file beyond this ratio is refused
_LARGE = 1 << 30  # bytes of decompressed text below which the ratio is not checked


def blocks(path: Path) -> Iterator[bytes]:
    """The contents of a file, decompressed if it begins as a gzip file does.

    Raises:
        BadInputError: the file is damaged gzip, or expands to more than 100 times its size.
        OSError: it cannot be read, or is not a regular file.
    """
    with open_input(path) as file:
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


def lines_of(found: Iterable[bytes], longest: int) -> Iterator[bytes | None]:
    """The lines of a file's blocks without their line feeds; None for a line of more than ``longest`` bytes."""
    begun: list[bytes] = []  # the parts of a line that the last block did not end
    size = 0
    for block in found:
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end]) if size + len(end) <= longest else None
            begun, size = [], 0
        size += len(rest)
        begun = [*begun, rest] if size <= longest else []
    if size:
        yield b"".join(begun) if size <= longest else None


def read_lines(path: Path, longest: int = LONGEST_TEXT, most: int = MOST_TEXT) -> Iterator[bytes]:
    """The lines of a text file that a caller holds in memory, without a byte order mark.

    Args:
        longest: the most bytes of a line.
        most: the most bytes of all lines together.

    Raises:
        BadInputError: a line or the file is larger, or the file is damaged gzip.
        OSError: it cannot be read, or is not a regular file.
    """
    total = 0
    for number, line in enumerate(lines_of(blocks(path), longest), 1):
        if line is None:
            raise BadInputError(f"{path}:{number}: this line has over {longest:,} bytes", "Split it.")
        total += len(line) + 1
        if total > most + 1:  # the last line may have no line feed
            raise BadInputError(f"{path}: holds more than {most >> 20} MB of text", "Split the file.")
        yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
