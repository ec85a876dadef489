"""Renders a chat turn by turn with the chat template, to the texts that a model would have read and written in it.

A response is what an assistant message adds to the rendering of all messages before it. Where the template marks
responses with ``{% generation %}``, the marked part of that addition counts in the loss. Otherwise the whole addition
counts, from the end of the generation prompt on.

Most templates render a chat so that every earlier turn stays as it was written. Then one text holds all responses.
Some change earlier turns: Qwen3's removes the reasoning of all answers before the last question. There, one text
cannot show each response as it was written in the context in which it was written. ``earlier_reasoning`` chooses:

- ``dropped``: each response stands in the context that the template shows when the response is written. A chat may
  become several texts: a new text begins with each response whose context differs from what the last text contains.
  Every response counts once.
- ``kept``: the chat becomes one text, in which every response stays as it was written. Later responses read the earlier
  reasoning.

The rendering runs in a child process with limits, because a template is a program that came with a model.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fcsd.checkpoint.chat_text import MAX_CHARACTERS
from fcsd.config import Source
from fcsd.disk import read_input_text
from fcsd.distill.data.examples import Message, Skip, too_long
from fcsd.errors import BadInputError, ConfigError
from fcsd.foreign_errors import reason_of

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLACEHOLDER = "\ue000fcsd\ue001"  # stands for the text of a response; private-use characters occur in no chat
_CANNOT_KEEP = "the chat template cannot keep earlier reasoning"


class Rendering(NamedTuple):
    """A rendered chat.

    Attributes:
        text: what the tokenizer reads.
        spans: the first character and the end (exclusive) of each part that counts in the loss.
    """

    text: str
    spans: list[tuple[int, int]]


_MAX_TEMPLATE = 1 << 20  # bytes
# messages, and whether the generation prompt follows them -> their rendering and the spans that the template marks
_Render = Callable[[list[Message], bool], Rendering]


def read_template(source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template of a source, or that of the tokenizer if the source names none.

    Raises:
        ConfigError: the template's file cannot be read.
        BadInputError: the source names no file, and the tokenizer has no template.
    """
    if source.chat_template is not None:
        try:
            return read_input_text(Path(source.chat_template), _MAX_TEMPLATE)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source.chat_template}: cannot be read as a chat template: {error}") from error
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise BadInputError(
            f"{source.path}: the tokenizer of {tokenizer.name_or_path} has no chat template",
            hint="name a Jinja file with `chat_template:`",
        ) from error


def render_chat(
    messages: list[Message], template: str, special_tokens: dict[str, Any], source: Source
) -> list[Rendering] | str:
    """The texts of a chat with the spans that count in the loss, or the reason why the chat cannot be used.

    The function runs in a ``LimitedProcess``. It therefore catches every exception of the template, and returns the
    reason instead of raising ``Skip``.

    Args:
        special_tokens: the tokenizer's ``special_tokens_map``, which templates read.
        source: its ``train_on`` and ``earlier_reasoning`` are read.
    """
    marked = bool(_MARK.search(template))
    render = partial(_render, template=template, special_tokens=special_tokens)
    try:
        if source.earlier_reasoning == "kept":
            found = [_keeping(messages, render, marked)]
        elif source.train_on == "response":
            found = _dropping(messages, render, marked)
        else:
            found = [render(messages, False)]
    except Skip as skip:
        return str(skip)
    except Exception as error:  # a template may fail in any way
        return f"refused by the chat template: {reason_of(error)}"
    if sum(len(rendering.text) for rendering in found) > MAX_CHARACTERS:
        return str(too_long())
    if source.train_on == "all":
        return [Rendering(rendering.text, [(0, len(rendering.text))]) for rendering in found]
    learned = [rendering for rendering in found if any(first < last for first, last in rendering.spans)]
    return learned or "no response begins where the chat template's generation prompt ends"


def _dropping(messages: list[Message], render: _Render, marked: bool) -> list[Rendering]:
    """The texts of ``dropped``: each response stands in the context that the template shows when it is written."""
    found: list[Rendering] = []
    for turn in _responses(messages):
        _, now = _written(messages, turn, render, marked)
        if found and now.text.startswith(found[-1].text):
            now = Rendering(now.text, found.pop().spans + now.spans)
        found.append(now)
    return found


def _keeping(messages: list[Message], render: _Render, marked: bool) -> Rendering:
    """The text of ``kept``: all responses as they were written, with the template's text between them."""
    text, spans = "", list[tuple[int, int]]()
    last = None  # the last response so far
    for turn in _responses(messages):
        begin, now = _written(messages, turn, render, marked)
        if last is not None and not now.spans:
            raise Skip(_CANNOT_KEEP)
        text += now.text[:begin] if last is None else _between(messages, last, turn, text, render, marked)
        shift = len(text) - begin
        spans += [(first + shift, end + shift) for first, end in now.spans]
        text, last = text + now.text[begin:], turn
    return Rendering(text, spans)


def _responses(messages: list[Message]) -> list[int]:
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _written(messages: list[Message], turn: int, render: _Render, marked: bool) -> tuple[int, Rendering]:
    """The rendering that ends with a response, and the position in it where the response begins.

    The spans of the rendering are the parts of this response that count. There are none if the rendering does not begin
    with the rendering of the earlier messages. There are also none for an unmarked response in the first turn.
    """
    now = render(messages[: turn + 1], False)
    before = render(messages[:turn], not marked).text if turn else ""
    begin, end = len(before), len(now.text)
    if not now.text.startswith(before) or (turn == 0 and not marked):
        return end, Rendering(now.text, [])
    return begin, Rendering(now.text, [span for span in now.spans if span[0] >= begin] if marked else [(begin, end)])


def _between(messages: list[Message], last: int, turn: int, text: str, render: _Render, marked: bool) -> str:
    """The text that the template adds between the response ``last``, which ends ``text``, and the response ``turn``.

    Both renderings have a placeholder in place of the response ``last``, because the template may change this response
    once other messages follow. The text after the placeholder does not depend on the response.
    """
    until = [*messages[:last], {"role": "assistant", "content": _PLACEHOLDER}]
    alone = render(until, False).text.split(_PLACEHOLDER)
    followed = render([*until, *messages[last + 1 : turn]], not marked).text.split(_PLACEHOLDER)
    if len(alone) != 2 or len(followed) != 2 or not (text.endswith(alone[1]) and followed[1].startswith(alone[1])):
        raise Skip(_CANNOT_KEEP)
    return followed[1].removeprefix(alone[1])


def _render(
    messages: list[Message], generation_prompt: bool, template: str, special_tokens: dict[str, Any]
) -> Rendering:
    rendered: Any = render_jinja_template(
        conversations=[messages],  # type: ignore[arg-type]
        chat_template=template,
        return_assistant_tokens_mask=bool(_MARK.search(template)),
        add_generation_prompt=generation_prompt,
        **special_tokens,
    )
    texts, marks = rendered
    return Rendering(texts[0], marks[0] if marks else [])
