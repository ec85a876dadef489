"""Output directories that exist as a whole or not at all, and files taken over from a source without touching it."""

import errno
import fcntl
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from fcsd.checkpoint import read_object
from fcsd.disk import sync, sync_directories
from fcsd.errors import ConfigError, DiskError, PreemptedError

_CHUNK = 64 << 20  # bytes between two movements of the progress bar
# What os.link says where two directories cannot share a file: other file system, no support, not ours, too many.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def check_out(out: Path, sources: list[Path], *, force: bool) -> None:
    """Check that ``out`` may be written, before anything is.

    Raises:
        ConfigError: it lies in a source or holds one, is not a directory, is not empty without ``force``, or holds
            what fcsd has not written.
    """
    real = out.resolve()
    for source in (source.resolve() for source in sources):
        if real.is_relative_to(source) or source.is_relative_to(real):
            raise ConfigError(f"{out}: overlaps with its source {source}", "Choose a directory beside it.")
    if not real.exists():
        return
    if not real.is_dir():
        raise ConfigError(f"{out}: is a file", "OUT is the directory to write.")
    if not any(real.iterdir()):
        return
    if not force:
        raise ConfigError(f"{out}: is not empty", "Choose another directory, or replace it with --force.")
    if not (real / "config.json").is_file() or "fcsd" not in read_object(real / "config.json"):
        raise ConfigError(f"{out}: is not empty and not fcsd's work", "--force replaces converted directories only.")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new directory beside ``out`` that takes its place when the block succeeds, and vanishes when it does not.

    Call ``check_out`` first: what is at ``out`` is replaced.
    """
    real = out.resolve()
    real.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(real)
    stage = real.with_name(f".{real.name}.tmp-{uuid.uuid4().hex[:8]}")
    stage.mkdir()
    lock = _lock(stage)
    try:
        with _interruptible():
            yield stage
        sync_directories(stage)
        former = real.with_name(f".{real.name}.old-{uuid.uuid4().hex[:8]}")
        replaced = real.exists()
        if replaced:
            real.rename(former)
        try:
            stage.rename(real)
        except OSError:
            if replaced:
                former.rename(real)
            raise
        sync(real.parent)
        if replaced:
            shutil.rmtree(former)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def take_over(files: Mapping[str, Path], into: Path) -> int:
    """Give ``into`` the files, name -> regular file, by hard link or, where that cannot be, by copy.

    A link shares the file with its source: nobody may open it for writing. A copy shares blocks where the file
    system can, and shows its progress.

    Returns:
        The number of bytes copied; 0 if all were linked.

    Raises:
        DiskError: the copies would not fit.
    """
    copies = {name: file for name, file in files.items() if not _linked(file, into / name)}
    total = sum(file.stat().st_size for file in copies.values())
    if total > shutil.disk_usage(into).free:
        raise DiskError(f"{into.parent}: {total} bytes must be copied, and do not fit", "Choose the source's disk.")
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
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress("copying", *columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("copy", total=total)
        for name, file in files.items():
            with file.open("rb") as source, (into / name).open("xb") as target:
                while moved := _copy_chunk(source, target):
                    progress.advance(task, moved)
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
    """Hold a directory until the descriptor is closed, at the latest when this process ends, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(out: Path) -> None:
    """Delete what a killed process left beside ``out``; a living one holds its lock."""
    for stage in out.parent.glob(f".{out.name}.tmp-*"):
        with suppress(BlockingIOError):
            lock = _lock(stage)
            shutil.rmtree(stage)
            os.close(lock)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM raises inside the block, as Ctrl-C does, so that it cleans up after itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> NoReturn:
    raise PreemptedError("stopped by SIGTERM; nothing was written")
