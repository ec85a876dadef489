"""Reads the text, the token ids or the chat in one row of a source, or finds the reason why the row cannot be used."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fcsd.checkpoint.chat_text import MAX_CHARACTERS
from fcsd.config import Source
from fcsd.distill.data.raw_table import LONGEST_LINE

# message_keys -> (key of the speaker, key of the text, the names of roles that differ from ours -> our names)
_KEYS = {
    "role/content": ("role", "content", {}),
    "from/value": ("from", "value", {"human": "user", "gpt": "assistant"}),
}
_ROLES = ("system", "user", "assistant", "tool")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors put it in front of UTF-8

Message = dict[str, str]


class Skip(Exception):
    """Raised for a row that cannot be used. The message is the reason under which the row is counted."""


def too_long() -> Skip:
    """The ``Skip`` for a row with more than ``MAX_CHARACTERS`` characters of text."""
    return Skip(f"over {MAX_CHARACTERS:,} characters")


def row_of_line(line: bytes | None, columns: tuple[str, ...]) -> dict[str, Any]:
    """The columns of a JSON line. The line is None if it was too long to be read.

    Raises:
        Skip: the line cannot be used.
    """
    if line is None:
        raise Skip(f"a line over {LONGEST_LINE:,} bytes")
    try:
        text = line.removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError:
        raise Skip("not UTF-8") from None
    if not text.strip():
        raise Skip("empty")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise Skip("not JSON") from None
    missing = [name for name in columns if not isinstance(row, dict) or name not in row]
    if missing:
        raise Skip(f"without {missing[0]!r}")
    return {name: row[name] for name in columns}


def text_of(row: Mapping[str, Any], source: Source) -> str:
    """The plain text of a row.

    Raises:
        Skip: the text cannot be used.
    """
    text = _text(row[source.column])
    if not text.strip():
        raise Skip("empty")
    return text


def token_ids_of(row: Mapping[str, Any], column: str) -> list[int]:
    """The token ids of a row.

    Raises:
        Skip: the row has no list of integers, or one of them is negative.
    """
    if not isinstance(row[column], list):
        raise Skip("not a list of token ids")
    if not row[column]:
        raise Skip("empty")
    if len(row[column]) > MAX_CHARACTERS:
        raise too_long()
    try:
        ids = np.array(row[column])
    except ValueError:  # lists of different lengths
        raise Skip("not a list of token ids") from None
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise Skip("not a list of token ids")
    if ids.min() < 0:
        raise Skip("outside the vocabulary")
    return row[column]


def chat_of(row: Mapping[str, Any], source: Source) -> list[Message]:
    """The chat of a row: messages with a known ``role`` and a ``content``, at least one of them by the assistant.

    Raises:
        Skip: the chat cannot be used.
    """
    if source.messages is None:
        assert source.prompt is not None and source.response is not None
        question, answer = (_text(row[name]) for name in (source.prompt, source.response))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    else:
        messages = _messages(row[source.messages], source.message_keys)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers:
        raise Skip("without a response")
    if not all(map(str.strip, answers)):
        raise Skip("empty response")
    if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
        raise too_long()
    return messages


def _messages(value: object, keys: str) -> list[Message]:
    role_key, content_key, names = _KEYS[keys]
    if not isinstance(value, list):
        raise Skip("not a list of messages")
    if not value:
        raise Skip("empty")
    messages = []
    for message in value:
        if not isinstance(message, dict) or role_key not in message or content_key not in message:
            raise Skip(f"a message without {role_key!r} and {content_key!r}")
        role = names.get(str(message[role_key]), message[role_key])
        if role not in _ROLES:
            raise Skip("a speaker other than " + ", ".join([*names, *(r for r in _ROLES if r not in names.values())]))
        messages.append({"role": role, "content": _text(message[content_key])})
    return messages


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Skip("not text")
    if len(value) > MAX_CHARACTERS:
        raise too_long()
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise Skip("not Unicode text") from None
    return value
