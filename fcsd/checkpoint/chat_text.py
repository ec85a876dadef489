"""Renders a conversation with a tokenizer's chat template, which is a program that came with a model.

Every command renders in a child process with limits. ``fcsd/distill/data/chat_template.py`` does it turn by turn.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fcsd.checkpoint.limited_process import LimitedProcess, LimitExceededError
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of

MAX_CHARACTERS = 10_000_000  # in a text or a chat; a tokenizer needs several hundred bytes of memory per character


def limited_template(tokenizer: Any) -> LimitedProcess:
    """The process in which :func:`chat_text` renders, from the first text to the end of its ``with`` block."""
    return LimitedProcess(partial(_rendered, tokenizer))


def chat_text(template: LimitedProcess, messages: Sequence[dict[str, str]], name: str, **options: Any) -> str:
    """The text of a conversation, as ``apply_chat_template`` renders it.

    Args:
        template: see :func:`limited_template`.
        messages: the turns, each with ``role`` and ``content``.
        options: arguments of ``apply_chat_template``, such as ``add_generation_prompt``.

    Raises:
        BadInputError: the template exceeds its limits, refuses the conversation, or makes too long a text of it.
    """
    whose = f"{name or 'the tokenizer'}: its chat template"
    try:
        text, reason = template((list(messages), options))
    except LimitExceededError as error:
        raise BadInputError(f"{whose} {error}") from error
    if reason:
        raise BadInputError(f"{whose} refuses the conversation: {reason}")
    return text


def _rendered(tokenizer: Any, call: tuple[list[dict[str, str]], dict[str, Any]]) -> tuple[str, str]:
    """The text and an empty reason, or an empty text and the reason why there is none."""
    messages, options = call
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template may fail in any way
        return "", reason_of(error)
    return (text, "") if len(text) <= MAX_CHARACTERS else ("", f"over {MAX_CHARACTERS:,} characters")
