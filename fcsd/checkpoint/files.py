"""Safe reading of untrusted files: regular files only, inside their directory, and JSON without ambiguities."""

import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from fcsd.errors import BadInputError
from fcsd.strict_json import StrictJsonError, parse
from fcsd.terminal import bounded

INFINITE = ("time_step_limit",)  # keys of which a value may be infinite
MAX_JSON = 10 << 20  # bytes; the longest config.json or tokenizer_config.json in the wild is below 1 MB
_MAX_DIGITS = 40

# Surrogates are excluded, because Python puts them in the place of bytes that are not UTF-8.
_PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[^/\\:\0-\x1f\ud800-\udfff]{1,255}")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
}


def quoted(text: str) -> str:
    """A text from an untrusted file, safe to print on one line: it is escaped, and cut after 100 characters."""
    return bounded(repr(text), 100)


def shown(name: str) -> str:
    """A text from an untrusted file: unchanged if it is short and printable, otherwise :func:`quoted`."""
    return name if name.isprintable() and len(name) <= 200 else quoted(name)


def contained(root: Path, *parts: str) -> Path:
    """The file that ``root/parts`` leads to. Only names and links are checked; the file need not exist.

    A link may lead anywhere inside ``root``, and into the ``blobs/`` directory of a repository in a hub cache, whose
    files are named by their hashes. Any other link could put a file of the user's into what convert copies and push
    publishes.

    Raises:
        BadInputError: a part is not a plain file name, or the path leads elsewhere.
    """
    real, home = _followed(root, *parts)
    blobs = real.parent
    in_cache = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    if not (real.is_relative_to(home) or in_cache):
        where = root.joinpath(*parts)
        raise BadInputError(f"{where}: is a link that leaves the checkpoint", "Copy the file it points to there.")
    return real


def weights_file(root: Path, name: str) -> Path:
    """The file of weights that ``root/name`` leads to. A link may lead to a regular file anywhere.

    Such links are usual, because weights are large. A file that is read as weights shows nothing of another content.

    Raises:
        BadInputError: ``name`` is not a plain file name, or a link out of ``root`` does not lead to a regular file.
    """
    real, home = _followed(root, name)
    if not real.is_relative_to(home):
        try:
            check_regular(real)
        except BadInputError as error:
            raise BadInputError(f"{root / name}: is a link, and {error}", "Link or copy the weights again.") from None
    return real


def _followed(root: Path, *parts: str) -> tuple[Path, Path]:
    """The path that ``root/parts`` leads to, and that of ``root``, both without links."""
    for part in parts:
        if not _PLAIN_NAME.fullmatch(part):
            hint = "Shards must lie in the directory, and file names must be UTF-8."
            raise BadInputError(f"{root}: {quoted(part)} is not a plain file name", hint)
    home = Path(os.path.realpath(root))
    return Path(os.path.realpath(home.joinpath(*parts))), home


def check_regular(path: Path) -> int:
    """The size in bytes of a regular file, which is not opened.

    Raises:
        BadInputError: the file is missing, or it is not a regular file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise BadInputError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"{path}: cannot be opened ({reason})") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadInputError(f"{path}: is {_KINDS.get(stat.S_IFMT(found.st_mode), 'special')}, not a regular file")
    return found.st_size


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Anything else is refused without being opened, because a FIFO would block.

    Raises:
        BadInputError: the file is missing or unreadable, or it is not a regular file.
    """
    check_regular(path)
    try:
        # O_NONBLOCK: if a FIFO replaces the file between the check and this call, the call returns at once.
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise BadInputError(f"{path}: cannot be opened ({error.strerror})") from None


def parse_object(text: bytes, where: str | Path) -> dict[str, Any]:
    """Parse a JSON object; see ``fcsd.strict_json``.

    Numbers may have the 31 digits that transformers writes for a tokenizer without a longest text, and
    ``time_step_limit`` of published models with state spaces holds ``Infinity``.

    Raises:
        BadInputError: the text is not such a JSON object.
    """
    try:
        value = parse(text, digits=_MAX_DIGITS, infinite=INFINITE)
    except StrictJsonError as error:
        raise BadInputError(
            f"{where}: is not strict JSON ({error})", "Correct the file, or download it again."
        ) from None
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_object(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Read a JSON object from a regular file of at most ``limit`` bytes; see :func:`parse_object`."""
    with open_regular(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise BadInputError(f"{path}: is larger than {limit >> 20} MB")
    return parse_object(text, path)


def with_floats(value: Any) -> Any:
    """A value of config.json, in which transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: with_floats(inner) for key, inner in value.items()}
    return [with_floats(inner) for inner in value] if isinstance(value, list) else value
