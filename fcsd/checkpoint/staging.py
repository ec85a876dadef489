"""Writes output directories that exist as a whole or not at all, and links or copies files into them.

Two processes may write to one OUT at the same time, and a user may put files there meanwhile. OUT is therefore checked
twice: before the work starts, and at the rename that ends it. A file that was not there at the first check is never
deleted.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fcsd.checkpoint import read_object
from fcsd.disk import UNFINISHED, left_over, locked, require_writable, scratch, sync, sync_directories
from fcsd.errors import ConfigError, DiskError
from fcsd.progress import progress

Contents = frozenset[tuple[str, int, int, int]]  # path, inode, size and time of every entry of a directory

_ASIDE = ".old-"  # in the name of what ``_replace`` moves out of the way
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
    _restore(real)
    if not real.exists() or not any(real.iterdir()):
        return None
    contents = _contents(real)  # taken before config.json is read, because files that appear later are unchecked
    if not force:
        raise ConfigError(f"{out}: is not empty", "Choose another directory, or replace it with --force.")
    if not _is_ours(real):
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
    with scratch(real.parent, f".{real.name}.tmp-", out) as stage:
        yield stage
        sync_directories(stage)
        if former is None:
            _rename_to_empty(stage, real)
        else:
            _replace(stage, real, former)
        (real / UNFINISHED).unlink()  # not earlier: killed before the rename, it would be left over for ever
        sync(real.parent)


def _rename_to_empty(stage: Path, out: Path) -> None:
    """Rename a directory. The system refuses this if ``out`` is a file or a directory that is not empty."""
    try:
        stage.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise _appeared(out) from None


def _replace(stage: Path, out: Path, former: Contents) -> None:
    """Replace ``out`` by ``stage`` if the entries of ``out`` are still those of ``former``.

    If the process is killed meanwhile, ``_restore`` takes up what is left.
    """
    aside = out.with_name(f".{out.name}{_ASIDE}{uuid.uuid4().hex[:8]}")
    with ExitStack() as held:
        try:
            held.enter_context(locked(out))
        except FileNotFoundError:  # removed meanwhile
            return _rename_to_empty(stage, out)
        except (BlockingIOError, NotADirectoryError):
            raise _appeared(out) from None
        out.rename(aside)
        try:
            if _contents(aside) != former:
                raise _appeared(out)
            (aside / UNFINISHED).touch()  # from now on it may be deleted
            _rename_to_empty(stage, out)
        except BaseException:
            (aside / UNFINISHED).unlink(missing_ok=True)
            with suppress(ConfigError):  # if ``out`` exists again, both directories stay
                _rename_to_empty(aside, out)
            raise
        shutil.rmtree(aside)


def _restore(out: Path) -> None:
    """Undo or end what a process that was killed in ``_replace`` has begun: the former ``out`` comes back, or goes."""
    for aside in left_over(out.parent, re.escape(f".{out.name}{_ASIDE}"), directories=True):
        with suppress(OSError), locked(aside):  # in use, gone meanwhile, or another user's
            if not out.exists() and _is_ours(aside):
                (aside / UNFINISHED).unlink(missing_ok=True)
                aside.rename(out)
            elif (aside / UNFINISHED).is_file():
                shutil.rmtree(aside)


def _is_ours(directory: Path) -> bool:
    """Whether fcsd wrote a directory."""
    return (directory / "config.json").is_file() and "fcsd" in read_object(directory / "config.json")


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
