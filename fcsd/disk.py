"""Files that appear as a whole and are on disk when a call returns, and the SHA-256 of files, bytes and JSON."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, TextIO

from fcsd.errors import ConfigError, DiskError

UNFINISHED = ".fcsd-unfinished"  # the file that marks a directory as ours to delete
_ELSEWHERE = "Choose another directory, or change who may write there."


def require_folder(folder: Path, named: str, *, of_a_model: bool = False) -> None:
    """Check that files could be written to ``folder``, which need not exist. Nothing is written.

    Args:
        named: the option or key that names the folder.
        of_a_model: whether the folder may have a model's config.json.

    Raises:
        ConfigError: it is a file or lies below one, or is the directory of a model.
        DiskError: it, or the nearest folder above it that exists, may not be written.
    """
    hint = f"give another {named}"
    if not of_a_model and (folder / "config.json").exists():
        raise ConfigError(f"{named} {folder}: is the directory of a model", hint)
    place = folder
    while not (place.exists() or place.is_symlink()) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{named} {folder}: {place} is not a directory", hint)
    require_writable(place, f"{named} {folder}")


def require_writable(folder: Path, what: str) -> None:
    """Check that this user may create files in ``folder``, which exists; ``what`` is to be written there.

    Raises:
        DiskError: the permissions, a file system that is read-only, or a full disk do not allow it.
    """
    try:  # permissions do not say it: root has them in /proc, too
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DiskError(f"{what}: {folder} is not writable ({error.strerror})", _ELSEWHERE) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, see :func:`write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON with sorted keys, see :func:`write_bytes`."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def write_bytes(path: Path, data: bytes) -> None:
    """Create or replace a file in one step: readers see the old file or the new one, never a part of it.

    The data is written to a temporary file in the same directory, synced to disk and renamed. A file that ``path``
    shared with another directory by a hard link is replaced here and left unchanged there.

    A file that is replaced keeps its permissions.

    Raises:
        ConfigError: ``path`` is a link, a directory or anything else but a regular file; it is left as it is.
        OSError: the directory cannot be written. The temporary file is removed, and ``path`` is as it was.
    """
    mode = _mode_of_regular(path)
    temporary = path.with_name(f".{path.name[:200]}.part-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary file, which no user knows
            del error.filename2
        raise
    sync(path.parent)


def write_picture(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib as a PNG, see :func:`write_bytes`."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_bytes(path, picture.getvalue())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside the block, an OSError without a file's name gets ``path``: writing meets a full disk and knows no name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def open_input(path: Path) -> BufferedReader:
    """Open a file that a user or another program wrote, to read it.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it cannot be read, or is not a regular file: such a file could be endless or never begin.
    """
    # O_NONBLOCK: the call returns at once at a FIFO, at which it would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_input(path: Path, limit: int = 256 << 20) -> bytes:
    """The content of a file, see :func:`open_input`.

    Args:
        limit: the most bytes that such a file may have.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it cannot be read, is not a regular file, or is too large.
    """
    with open_input(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MB", str(path))
    return data


def read_input_text(path: Path, limit: int = 256 << 20, encoding: str = "utf-8") -> str:
    """The content of a text file, in which every line ends with a line feed; see :func:`read_input`.

    Raises:
        OSError: see :func:`read_input`.
        UnicodeDecodeError: the file has another encoding.
    """
    return read_input(path, limit).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def open_to_append(path: Path) -> TextIO:
    """Open a file of UTF-8 text to read it and to add to its end; it is created if it does not exist.

    Raises:
        ConfigError: ``path`` is a link, a directory or anything else but a regular file; it is left as it is.
        OSError: the file cannot be written.
    """
    _mode_of_regular(path)
    # The flags hold even if a link or a FIFO replaces the file after the check.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a+", encoding="utf-8")


def append(path: Path, text: str) -> None:
    """Add ``text`` to the end of a file as a whole; if the disk has no room for it, the file stays as it is.

    Raises:
        ConfigError: see :func:`open_to_append`.
        OSError: the file cannot be written; the error names it.
    """
    with naming(path), open_to_append(path) as file:
        end, left = os.fstat(file.fileno()).st_size, text.encode()
        try:
            while left:
                left = left[os.write(file.fileno(), left) :]
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def _mode_of_regular(path: Path) -> int | None:
    """The permissions of a regular file that is about to be written; None if it does not exist."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise ConfigError(
            f"{path}: is not a regular file, so it is not written", "Remove it, or choose another name for the output."
        )
    return stat.S_IMODE(found)


def left_over(folder: Path, before: str, *, directories: bool) -> list[Path]:
    """What killed processes left in a folder: entries whose name is ``before`` and 8 hexadecimal digits.

    Args:
        before: a regular expression, in which names of a user are escaped.
        directories: whether the entries are directories; if not, they are regular files. Links are never among them.
    """
    name = re.compile(rf"(?:{before})[0-9a-f]{{8}}")
    kind = stat.S_ISDIR if directories else stat.S_ISREG
    entries = folder.iterdir() if folder.is_dir() else ()
    return [path for path in entries if name.fullmatch(path.name) and kind(path.lstat().st_mode)]


@contextmanager
def scratch(place: Path, name: str, named: Path | None = None) -> Iterator[Path]:
    """A new directory in ``place``, for what is too large for the system's own, that is deleted after the block.

    What killed processes left under this name is deleted first. A process that still runs holds a lock on its own.

    Args:
        name: how the directory's name begins; it ends in 8 hexadecimal digits.
        named: what an error names if the directory cannot be made, because nobody knows the directory.
    """
    for path in left_over(place, re.escape(name), directories=True):
        if (path / UNFINISHED).is_file():  # otherwise it is not ours, whatever its name
            with suppress(OSError), locked(path):  # in use, gone meanwhile, or another user's
                shutil.rmtree(path)
    folder = place / f"{name}{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        error.filename = str(named or place)
        raise
    with locked(folder):
        try:
            (folder / UNFINISHED).touch()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a directory, at the latest until this process ends; a BlockingIOError if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directories(root: Path) -> None:
    """:func:`sync` a directory and every directory below it; the files in them must have been synced before."""
    for directory in (root, *filter(Path.is_dir, root.rglob("*"))):
        sync(directory)


def bytes_sha256(data: bytes) -> str:
    """SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal; the file is read in pieces.

    Raises:
        OSError: see :func:`open_input`.
    """
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """SHA-256 of a value's JSON text with sorted keys, so that the order of keys does not matter."""
    return bytes_sha256(json.dumps(value, sort_keys=True).encode())
