"""Makes text of models, data and files safe to print, and keeps messages that cannot be printed from ending a command.

A terminal obeys control characters.
"""

import io
import os
import re
from typing import TextIO

# All but the line feed and the tab: C0, DEL and C1, which holds one-character forms of escape sequences.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""A text whose control characters are written as ``\u001b``, as in JSON; line feeds and tabs stay.

    A carriage return before a line feed is dropped. JSON text keeps its meaning.
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


def bounded(text: str, limit: int) -> str:
    """The first ``limit`` characters of a text and, if there are more, how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} characters more)"


class _Messages(io.FileIO):
    """A descriptor that drops what it cannot write."""

    def write(self, data, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def lasting(stderr: TextIO | None) -> TextIO:
    """A stream for messages, in place of ``stderr``, whose writes never fail; None is a stream that the caller closed.

    A log on a full disk, a reader that has gone and a terminal that was closed must not end a run of days.
    """
    descriptor = os.open(os.devnull, os.O_WRONLY) if stderr is None else stderr.fileno()
    raw = io.BufferedWriter(_Messages(descriptor, "w", closefd=False))
    encoding = "utf-8" if stderr is None else stderr.encoding
    return io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
