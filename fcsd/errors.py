"""What went wrong, in one line, with the fix: one class per exit code."""


class FcsdError(Exception):
    """Base of every error fcsd raises on purpose.

    Args:
        message: one line that says what is wrong and where.
        hint: what to do about it; printed below the message.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(FcsdError):
    """A recipe, option or value the user wrote is wrong."""

    exit_code = 2


class BadInputError(FcsdError):
    """A checkpoint, dataset or file given as input cannot be used."""

    exit_code = 3


class CheckpointError(FcsdError):
    """A training checkpoint is missing, damaged or does not match the run."""

    exit_code = 4


class NonFiniteError(FcsdError):
    """Teacher, loss or gradients became NaN or infinite."""

    exit_code = 5


class PeerLostError(FcsdError):
    """Another rank died, hung or never came up."""

    exit_code = 6


class DiskError(FcsdError):
    """The disk is full, read-only or too small."""

    exit_code = 7


class DoesNotFitError(FcsdError):
    """The plan needs more memory than there is."""

    exit_code = 8


class VerdictError(FcsdError):
    """A required verdict was not met."""

    exit_code = 9


class PreemptedError(FcsdError):
    """SIGTERM ended the run; the message names the last committed checkpoint."""

    exit_code = 143
