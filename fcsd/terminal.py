"""Makes text of models, data and files safe to print: a terminal obeys control characters."""

import re

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
