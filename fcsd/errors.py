"""The errors that fcsd raises on purpose: one class for each exit code, with a one-line message and a hint."""

import signal
from collections.abc import Iterable
from difflib import get_close_matches


class Stopped(SystemExit):
    """A signal ended the command, whose exit code is 128 and its number. No library catches this as an Exception."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.name = signal.Signals(number).name


class FcsdError(Exception):
    """The base class of every error that fcsd raises on purpose.

    Args:
        message: one line that says what is wrong and where.
        hint: what the user can do about it; it is printed below the message.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(FcsdError):
    """A recipe, an option or a value that the user wrote is wrong."""

    exit_code = 2


def unknown_value(what: str, value: str, choices: Iterable[str]) -> ConfigError:
    """The error for a value that is none of ``choices``. Its hint names the closest one, if any is close, and all."""
    known = list(choices)
    close = get_close_matches(value.lower(), known, n=1)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"unknown {what} {value!r}", f"{meant}Choose one of: {', '.join(known)}")


class BadInputError(FcsdError):
    """A checkpoint, dataset or file that was given as input cannot be used."""

    exit_code = 3


class CheckpointError(FcsdError):
    """A training checkpoint is missing, damaged or does not match the run."""

    exit_code = 4


class CheckpointVersionError(CheckpointError):
    """A training checkpoint is whole, but of another version than this code writes and reads."""


class NonFiniteError(FcsdError):
    """The teacher's output, the loss or the gradients became NaN or infinite."""

    exit_code = 5


class PeerLostError(FcsdError):
    """Another rank died, hung or did not start."""

    exit_code = 6


class DiskError(FcsdError):
    """The disk is full, read-only or too small."""

    exit_code = 7


class DoesNotFitError(FcsdError):
    """The run or the plan needs more memory than there is."""

    exit_code = 8


class VerdictError(FcsdError):
    """The results do not meet a verdict that the user required."""

    exit_code = 9


class PreemptedError(FcsdError):
    """SIGTERM ended the run; the message names the last committed checkpoint."""

    exit_code = 143
