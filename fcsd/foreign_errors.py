"""Translates exceptions of other libraries into errors of fcsd that tell the user what to do.

One table lists the exceptions, and the first row that matches is used. A row names a class by its package and its name,
and these are compared with the exception's class and its base classes. This file therefore imports no other library.
"""

import errno
import os
from itertools import dropwhile
from pathlib import Path

from fcsd.errors import BadInputError, ConfigError, DiskError, DoesNotFitError, FcsdError, PeerLostError
from fcsd.terminal import bounded, printable

_MOST = 500  # characters of another library's text in a message

_LOGIN = "check the name; if it is private, run `hf auth login` with an account that may read it"
_NETWORK = "check the connection; for files already downloaded, set HF_HUB_OFFLINE=1"
_MEMORY = (
    "lower train.micro_batch_size or set train.activation_checkpointing: true, which recomputes; then lower "
    "objective.chunk_tokens, or raise parallel.zero_stage or --gpus; "
    "`fcsd plan` says what fits. Without a recipe, lower --batch-size"
)

_TABLE: list[tuple[str, str, type[FcsdError], str, str | None]] = [
    # Package, class, error class of fcsd, message, hint. A subclass is listed before its base class.
    ("huggingface_hub", "GatedRepoError", BadInputError, "the repository is gated",
     "accept its terms on its web page, then run `hf auth login`"),
    ("huggingface_hub", "DisabledRepoError", BadInputError, "the repository is disabled", None),
    ("huggingface_hub", "RepositoryNotFoundError", BadInputError, "no such repository", _LOGIN),
    ("huggingface_hub", "RevisionNotFoundError", BadInputError, "the repository has no such revision", None),
    ("huggingface_hub", "LocalEntryNotFoundError", BadInputError, "not cached, and the hub is out of reach",
     "go online once (unset HF_HUB_OFFLINE), or point HF_HOME at a filled cache"),
    ("huggingface_hub", "EntryNotFoundError", BadInputError, "the repository lacks a file", None),
    ("huggingface_hub", "OfflineModeIsEnabled", BadInputError, "the hub is needed, but offline mode is on",
     "unset HF_HUB_OFFLINE, or point HF_HOME at a filled cache"),
    ("huggingface_hub", "HFValidationError", ConfigError, "neither a directory nor a hub id", None),
    ("huggingface_hub", "LocalTokenNotFoundError", ConfigError, "no hub token", "run `hf auth login`"),
    ("huggingface_hub", "HfHubHTTPError", FcsdError, "the hub refused",
     "Check that your token may write there (`hf auth whoami`). In a repository of others, use --create-pr."),
    ("huggingface_hub", "StrictDataclassError", BadInputError, "config.json holds a value that cannot be",
     "Correct the value; the class of the model in transformers says what it may be."),
    ("httpx", "TransportError", FcsdError, "the network failed", _NETWORK),
    ("httpx2", "TransportError", FcsdError, "the network failed", _NETWORK),
    ("safetensors", "SafetensorError", BadInputError, "a safetensors file is damaged",
     "`fcsd inspect` names the file; download it again"),
    ("torch", "OutOfMemoryError", DoesNotFitError, "out of GPU memory", _MEMORY),
    ("builtins", "MemoryError", DoesNotFitError, "out of memory", _MEMORY),
    ("torch", "DistError", PeerLostError, "another process was lost or never came up",
     "the first error in the other ranks' output is the cause; NCCL_DEBUG=INFO says more"),
]  # fmt: skip

_SPACE = "free some space, or choose another directory; HF_HOME names that of the caches"
_ACCESS = "choose another directory, or change who may use it; HF_HOME names that of the caches"
_DISK = {  # number of the error -> message, hint
    errno.ENOSPC: ("the disk is full", _SPACE),
    errno.EDQUOT: ("the disk quota is used up", _SPACE),
    errno.EFBIG: ("a file may not grow so large", _SPACE),
    errno.EROFS: ("the file system is read-only", _ACCESS),
    errno.EACCES: ("the system refuses access", _ACCESS),
    errno.EPERM: ("the system does not permit it", _ACCESS),
    errno.ENOTDIR: ("a part of the path is a file", "choose another directory"),
    errno.EEXIST: ("a file is in the way", "choose another directory"),
}


def translate(error: BaseException, place: Path | None = None) -> FcsdError | None:
    """The fcsd error that explains `error` or the exception that caused it; None if neither is known.

    Args:
        place: what was written, if only disk errors that name no file can be about it.
    """
    link: BaseException | None = error
    while link is not None:
        found = link if isinstance(link, FcsdError) else _disk(link, place) or _row(link) or _width(link)
        if found is not None:
            return found
        link = link.__cause__
    return None


def reason_of(error: BaseException) -> str:
    """Why another library failed, in one line: the whole text of its exception, or the name of its class without one.

    The text can hold what a file held. Control characters are therefore escaped, and a long text ends with the number
    of the characters that were left out.
    """
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """A text of another library or process on one line, printable and bounded; see :func:`reason_of`."""
    return bounded(printable(" ".join(text.split())), _MOST)


def reason_in(output: str) -> str:
    """The reason of the exception with which a Python process ended, from what it printed; ``""`` if it printed none.

    The exception's class and text follow the last place of the traceback, whose source lines are indented. A process
    that ended without a traceback printed its reason last.
    """
    lines = output.strip().splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not places:
        return one_line(lines[-1]) if lines else ""
    return one_line(" ".join(dropwhile(lambda line: line.startswith("    "), lines[places[-1] + 1 :])))


def _row(error: BaseException) -> FcsdError | None:
    ancestry = {(cls.__module__.split(".")[0], cls.__name__) for cls in type(error).__mro__}
    for package, name, ours, message, hint in _TABLE:
        if (package, name) in ancestry:
            return ours(f"{message}: {reason_of(error)}", hint)
    return None


def _width(error: BaseException) -> FcsdError | None:
    """torch computes grouped products, and so routed experts, only with rows of a multiple of 16 bytes."""
    if not isinstance(error, RuntimeError) or "multiple of 16 bytes" not in str(error):
        return None
    return ConfigError(
        f"torch cannot compute routed experts of these widths in this data type: {reason_of(error)}",
        "Each rank's width of an expert, and the model's hidden size, must be multiples of 8 in bf16 and of 4 in fp32: "
        "choose another data type or another number of GPUs.",
    )


def _disk(error: BaseException, place: Path | None) -> FcsdError | None:
    if isinstance(error, OSError):
        # That of datasets, when it has looked before it writes, has no number.
        number = errno.ENOSPC if str(error).startswith("Not enough disk space") else error.errno
        if number in _DISK:
            message, hint = _DISK[number]
            where = error.filename2 or error.filename or place  # a failed copy names the written file second
            return DiskError(message + (f": {where}" if where else ""), hint)
    # safetensors and torch keep the text of the error but not its number. That of EPERM can be about a network, too.
    for number, (message, hint) in _DISK.items():
        if number != errno.EPERM and os.strerror(number) in str(error):
            return DiskError(f"{message}: {reason_of(error)}", hint)
    return None
