"""Writes output directories that exist as a whole or not at all, and links or copies files into them.

Two processes may write to one OUT at the same time, and a user may put files there meanwhile. OUT is therefore checked
twice: before the work starts, and at the rename that ends it. A file that was not there at the first check is never
deleted.
"""

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fcsd.checkpoint import read_object
from fcsd.disk import left_over, require_writable, sync, sync_directories
from fcsd.errors import ConfigError, DiskError
from fcsd.progress import progress

Contents = frozenset[tuple[str, int, int, int]]  # path, inode, size and time of every entry of a directory

_UNFINISHED = ".fcsd-unfinished"  # the file that marks a directory as ours to delete
_CHUNK = 64 << 20  # bytes that are copied between two updates of the progress
# The errors of os.link when two directories cannot share a file: they are on different file systems, the file system
# has no links, the file belongs to another user, or it has too many links.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def check_out(out: Path, sources: list[Path], *, force: bool) -> Contents | None:
    """Check that ``out`` may be written, before anything is written.

    Returns:
        The entries of ``out``, which ``staged`` may replace; None if ``out`` is empty or does not exist.

    Raises:
        ConfigError: ``out`` overlaps with a source, is not a directory or lies below a file, is not empty without
            ``force``, or holds files that fcsd has not written.
        DiskError: the directory in which ``out`` would be created or replaced may not be written.
    """
    real = out.resolve()
    for source in (source.resolve() for source in sources):
        if real.is_relative_to(source) or source.is_relative_to(real):
            raise ConfigError(f"{out}: overlaps with its source {source}", "Choose a directory beside it.")
    above = next(path for path in (real, *real.parents) if path.exists())
    if above != real and not above.is_dir():
        raise ConfigError(f"{out}: {above} is a file, not a directory", "OUT is the directory to write.")
    if above == real and not real.is_dir():
        raise ConfigError(f"{out}: is a file", "OUT is the directory to write.")
    require_writable(above if above != real else real.parent, str(out))
    if above != real:
        return None
    if not any(real.iterdir()):
        return None
    contents = _contents(real)  # taken before config.json is read, because files that appear later are unchecked
    if not force:
        raise ConfigError(f"{out}: is not empty", "Choose another directory, or replace it with --force.")
    if not (real / "config.json").is_file() or "fcsd" not in read_object(real / "config.json"):
        raise ConfigError(f"{out}: is not empty and not fcsd's work", "--force replaces converted directories only.")
    return contents


@contextmanager
def staged(out: Path, former: Contents | None = None) -> Iterator[Path]:
    """A new directory beside ``out``. It replaces ``out`` if the block succeeds, and is deleted if the block fails.

    Args:
        former: the entries that ``check_out`` found there; they may be replaced.

    Raises:
        ConfigError: the entries of ``out`` differ from ``former``; ``out`` is left as it is.
    """
    real = out.resolve()
    real.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(real)
    stage = real.with_name(f".{real.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        stage.mkdir()
    except OSError as error:
        error.filename = str(out)  # nobody knows the other name
        raise
    lock = _lock(stage)
    try:
        (stage / _UNFINISHED).touch()
        yield stage
        (stage / _UNFINISHED).unlink()
        sync_directories(stage)
        if former is None:
            _rename_to_empty(stage, real)
        else:
            _replace(stage, real, former)
        sync(real.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def _rename_to_empty(stage: Path, out: Path) -> None:
    """Rename a directory. The system refuses this if ``out`` is a file or a directory that is not empty."""
    try:
        stage.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise _appeared(out) from None


def _replace(stage: Path, out: Path, former: Contents) -> None:
    """Replace ``out`` by ``stage`` if the entries of ``out`` are still those of ``former``."""
    aside = out.with_name(f".{out.name}.old-{uuid.uuid4().hex[:8]}")
    try:
        out.rename(aside)
    except FileNotFoundError:  # removed meanwhile
        return _rename_to_empty(stage, out)
    try:
        if _contents(aside) != former:
            raise _appeared(out)
        _rename_to_empty(stage, out)
    except BaseException:
        with suppress(ConfigError):  # if ``out`` exists again, both directories stay
            _rename_to_empty(aside, out)
        raise
    shutil.rmtree(aside)


def _appeared(out: Path) -> ConfigError:
    return ConfigError(
        f"{out}: changed while this command ran; it was left as it is and nothing was written",
        "Did another fcsd write there? Look at it, then choose another directory or run the command again.",
    )


def _contents(directory: Path) -> Contents:
    """Path, inode, size and time of modification of every entry below a directory.

    A file that is changed in place gets another time of modification.
    """
    found = ((str(path.relative_to(directory)), path.lstat()) for path in directory.rglob("*"))
    return frozenset((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def copy_small(files: Mapping[str, Path], into: Path) -> None:
    """Copy files, given as name relative to ``into`` -> file. They are never linked, because people edit them."""
    for name, file in files.items():
        (into / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, into / name)


def take_over(files: Mapping[str, Path], into: Path) -> int:
    """Put files, given as name -> regular file, into ``into`` by hard link or, where that is impossible, by copy.

    A link shares the file with its source, so no process may open it for writing. A copy shares blocks where the file
    system supports it, and shows its progress.

    Returns:
        The number of bytes copied; 0 if all were linked.

    Raises:
        DiskError: the copies would not fit.
    """
    copies = {name: file for name, file in files.items() if not _linked(file, into / name)}
    total = sum(file.stat().st_size for file in copies.values())
    if total > shutil.disk_usage(into).free:
        from rich.filesize import decimal

        raise DiskError(
            f"{into.parent}: {decimal(total)} must be copied, and do not fit",
            "Free some space, or write to the source's disk.",
        )
    if copies:
        _copy(copies, into, total)
    return total


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in _CANNOT_LINK:
            return False
        raise
    return True


def _copy(files: Mapping[str, Path], into: Path, total: int) -> None:
    with progress("copying, GB", total / 1e9) as advance:
        for name, file in files.items():
            with file.open("rb") as source, (into / name).open("xb") as target:
                while moved := _copy_chunk(source, target):
                    advance(moved / 1e9)
                target.flush()
                os.fsync(target.fileno())


def _copy_chunk(source: BinaryIO, target: BinaryIO) -> int:
    try:
        return os.copy_file_range(source.fileno(), target.fileno(), _CHUNK)
    except OSError as error:
        if error.errno not in (*_CANNOT_LINK, errno.EINVAL):
            raise
    return target.write(source.read(_CHUNK))


def _lock(directory: Path) -> int:
    """Lock a directory until the returned descriptor is closed, at the latest when this process ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(out: Path) -> None:
    """Delete directories that killed processes left beside ``out``. A process that still runs holds its lock."""
    for stage in left_over(out.parent, re.escape(f".{out.name}.tmp-"), directories=True):
        if (stage / _UNFINISHED).is_file():  # otherwise it is not ours, whatever its name
            with suppress(BlockingIOError):
                lock = _lock(stage)
                shutil.rmtree(stage)
                os.close(lock)
