"""Writes output directories that exist as a whole or not at all, and links or copies files into them.

Two processes may write to one OUT at the same time, and a user may put files there meanwhile. OUT is therefore checked
twice: before the work starts, and at the rename that ends it. A file that was not there at the first check is never
deleted.

What a new directory copies from its source are the files beside the weights: tokenizer, templates, licence, card. It
contains no code but fcsd's own. Code files and pickles of an original are not copied, and an ``auto_map`` of an
original is removed from the files that hold one.
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fcsd.checkpoint.config_json import CODE_ENDINGS, MAY_NAME_CODE, without_auto_map
from fcsd.checkpoint.files import INDEX, check_regular, contained, read_object
from fcsd.disk import UNFINISHED, left_over, locked, require_writable, scratch, sync, sync_directories
from fcsd.errors import BadInputError, ConfigError, DiskError

Contents = frozenset[tuple[str, int, int, int]]  # path, inode, size and time of every entry of a directory

_ASIDE = ".old-"  # in the name of what ``_replace`` moves out of the way
_CHUNK = 64 << 20  # bytes that are copied between two updates of the progress
# The errors of os.link when two directories cannot share a file: they are on different file systems, the file system
# has no links, the file belongs to another user, or it has too many links.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

# Files with the same weights in another format. A new directory does not copy them.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
MAX_SIDE_FILE = 256 << 20  # bytes; the longest tokenizer.json in use is below 40 MB
_TEMPLATES = "additional_chat_templates"  # the only folder whose files are copied
# Files that run code when they are loaded. The tokenizers that transformers builds need none of them.
_PICKLES = (".pkl", ".pickle", ".joblib", ".dill")
_OBJECTS = (*MAY_NAME_CODE, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")


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


def side_files(path: Path, written: Set[str] = frozenset(), *, code: Set[str] = frozenset()) -> dict[str, Path]:
    """The files of a checkpoint directory that a new directory copies unchanged, and the index of its weights.

    Hidden files, weights, pickles and folders other than ``additional_chat_templates`` are left out.

    Args:
        written: names that the caller writes itself; they are left out, too.
        code: names of code files to copy; all other code files are left out.

    Returns:
        Name, relative to ``path`` -> the regular file behind it.

    Raises:
        BadInputError: a file is not a regular file, is larger than ``MAX_SIDE_FILE``, leaves the directory by a link,
            has a name that is not UTF-8, or is not the JSON object that transformers expects.
    """
    names = [entry.name for entry in path.iterdir() if not entry.is_dir()]
    names = [name for name in names if not name.startswith(".") and not name.endswith(OTHER_WEIGHTS)]
    if (path / _TEMPLATES).is_dir():
        names += [f"{_TEMPLATES}/{entry.name}" for entry in (path / _TEMPLATES).iterdir()]
    names = [name for name in names if name in code or not name.lower().endswith(CODE_ENDINGS + _PICKLES)]
    found = {name: contained(path, *name.split("/", 1)) for name in sorted(set(names) - written)}
    for name, file in found.items():
        size = check_regular(file)
        if size > MAX_SIDE_FILE:
            raise BadInputError(
                f"{path / name}: has {size} bytes; the limit for a file beside the weights is {MAX_SIDE_FILE >> 20} MB",
                "Move it out of the directory.",
            )
        if name in _OBJECTS:
            read_object(file, MAX_SIDE_FILE)
    if (path / INDEX).exists() and INDEX not in written:
        found[INDEX] = contained(path, INDEX)
    return found


def without_code(files: dict[str, Path]) -> dict[str, str]:
    """The files of :func:`side_files` that hold an ``auto_map`` -> their JSON text without it."""
    texts = {}
    for name, file in files.items():
        if name in MAY_NAME_CODE:
            content = read_object(file)
            if (plain := without_auto_map(content)) != content:
                texts[name] = json.dumps(plain, indent=2) + "\n"
    return texts


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
    from fcsd.progress import progress  # here, because vLLM's plugin reads checkpoints and needs no bar

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
