"""Reads the text, the token ids or the chat in one row of a source, or finds the reason why the row cannot be used."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fcsd.checkpoint.tokenizer import MAX_CHARACTERS
from fcsd.config import Source
from fcsd.distill.data.raw_table import LONGEST_LINE, TOOLS

# message_keys -> (key of the speaker, key of the text, the names of roles that differ from ours -> our names)
_KEYS = {
    "role/content": ("role", "content", {}),
    "from/value": ("from", "value", {"human": "user", "gpt": "assistant"}),
}
_ROLES = ("system", "user", "assistant", "tool")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors put it in front of UTF-8

# Keys of a message that say nothing to a reader of the chat.
_ABOUT = {"name", "weight", "train"}
_DEEPEST = 64  # levels of lists and objects in a field of a message; tool calls and their schemas have about ten

Message = dict[str, Any]


class Chat(NamedTuple):
    """A chat as the tokenizer's template gets it.

    Attributes:
        messages: each with ``role``, mostly with ``content``, and with every other field that it has in the data and
            that is not null, such as ``tool_calls`` or ``reasoning_content``.
        tools: the JSON schemas of the tools that the assistant may call; None if the row has none.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class Skip(Exception):
    """Raised for a row that cannot be used. The message is the reason under which the row is counted."""


def too_long() -> Skip:
    """The ``Skip`` for a row with more than ``MAX_CHARACTERS`` characters of text."""
    return Skip(f"over {MAX_CHARACTERS:,} characters")


def row_of_line(line: bytes | None, columns: tuple[str, ...]) -> dict[str, Any]:
    """The object of a JSON line, which has the given columns. The line is None if it was too long to be read.

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
    return row


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


def chat_of(row: Mapping[str, Any], source: Source, *, of_table: bool = False) -> Chat:
    """The chat of a row: messages with a known ``role``, at least one of them by the assistant, and its tools.

    Args:
        of_table: the row comes from an Arrow table, in which objects of one column all have the same keys. A key that
            is null there is taken for one that the object does not have.

    Raises:
        Skip: the chat cannot be used.
    """
    if source.messages is None:
        assert source.prompt is not None and source.response is not None
        question, answer = (_text(row[name]) for name in (source.prompt, source.response))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    else:
        messages = _messages(row[source.messages], source.message_keys, of_table)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise Skip("without a response")
    if any(counts(answer) and not (answer.get("content", "").strip() or _says(answer)) for answer in answers):
        raise Skip("empty response")
    tools = _tools(row.get(TOOLS), of_table)
    extra = [{key: value for key, value in message.items() if key != "content"} for message in messages]
    beside = [fields for fields in extra if len(fields) > 1]  # more than the role
    if sum(len(message.get("content", "")) for message in messages) + _characters([beside, tools]) > MAX_CHARACTERS:
        raise too_long()
    return Chat(messages, tools)


def counts(message: Message) -> bool:
    """Whether a turn may count in the loss: it does unless it has ``weight: 0`` or ``train: false``.

    Raises:
        Skip: the weight is another one than 0 and 1.
    """
    for key in ("weight", "train"):
        if message.get(key, 1) not in (0, 1):
            raise Skip(f"a message whose {key!r} is neither 0 nor 1")
    return bool(message.get("weight", 1) and message.get("train", 1))


def _messages(value: object, keys: str, of_table: bool) -> list[Message]:
    role_key, content_key, names = _KEYS[keys]
    if not isinstance(value, list):
        raise Skip("not a list of messages")
    if not value:
        raise Skip("empty")
    messages = []
    for message in value:
        if not isinstance(message, dict) or role_key not in message:
            raise Skip(f"a message without {role_key!r} and {content_key!r}")
        role = names.get(str(message[role_key]), message[role_key])
        if role not in _ROLES:
            raise Skip("a speaker other than " + ", ".join([*names, *(r for r in _ROLES if r not in names.values())]))
        content = message.get(content_key)
        read: Message = {"role": role} if content is None else {"role": role, "content": _text(content)}
        # As `apply_chat_template` does: a null field is one that the message does not have.
        others = {key: item for key, item in message.items() if key not in (role_key, content_key) and item is not None}
        read |= _plain(others, of_table)
        counts(read)
        if content is None and not _says(read):
            raise Skip("not text" if content_key in message else f"a message without {role_key!r} and {content_key!r}")
        messages.append(read)
    return messages


def _says(message: Message) -> bool:
    """Whether a message says something beside its content, such as the call of a tool."""
    return any(value for key, value in message.items() if key not in {"role", "content", *_ABOUT})


def _tools(value: object, of_table: bool) -> list[dict[str, Any]] | None:
    """The tools of a row, which tables often hold as a text of JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Skip(f"{TOOLS!r} that are not JSON") from None
    if value is None or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Skip(f"{TOOLS!r} that are not a list of objects")
    return _plain(value, of_table)


def _plain(value: Any, of_table: bool, depth: int = 0) -> Any:
    """A field, of a table without the keys whose value is null.

    Raises:
        Skip: it is nested too deeply.
    """
    if depth > _DEEPEST:
        raise Skip(f"a field nested more than {_DEEPEST} levels deep")
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (of_table and item is None)}
        return {key: _plain(item, of_table, depth + 1) for key, item in kept.items()}
    return [_plain(item, of_table, depth + 1) for item in value] if isinstance(value, list) else value


def _characters(value: object) -> int:
    """The number of characters of fields as JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise Skip("not Unicode text") from None
    return len(text)


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
