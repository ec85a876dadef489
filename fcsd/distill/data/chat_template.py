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

The template gets the messages with all their fields and the row's tools, as ``apply_chat_template`` passes them. A
field without which the template writes the same text is one that it does not read. Such fields are counted, because
what they say is lost.

The rendering runs in a child process with limits, because a template is a program that came with a model.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fcsd.checkpoint.tokenizer import MAX_CHARACTERS
from fcsd.config import Source
from fcsd.disk import read_input_text
from fcsd.distill.data.examples import Chat, Message, Skip, counts, too_long
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


class Rendered(NamedTuple):
    """The texts of a chat, and the fields of its messages that the template does not read, once for each message."""

    texts: list[Rendering]
    unread: list[str]


class Templates(NamedTuple):
    """The chat template for chats without tools and that for chats with tools, which some tokenizers have apart."""

    plain: str
    tools: str


_MAX_TEMPLATE = 1 << 20  # bytes
# messages, and whether the generation prompt follows them -> their rendering and the spans that the template marks
_Render = Callable[[list[Message], bool], Rendering]


def read_templates(source: Source, tokenizer: PreTrainedTokenizerBase) -> Templates:
    """The chat template of a source, or those of the tokenizer if the source names none.

    Raises:
        ConfigError: the template's file cannot be read.
        BadInputError: the source names no file, and the tokenizer has no template.
    """
    if source.chat_template is not None:
        try:
            text = read_input_text(Path(source.chat_template), _MAX_TEMPLATE)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source.chat_template}: cannot be read as a chat template: {error}") from error
        return Templates(text, text)
    try:
        return Templates(tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[]))
    except ValueError as error:
        raise BadInputError(
            f"{source.path}: the tokenizer of {tokenizer.name_or_path} has no chat template",
            hint="name a Jinja file with `chat_template:`",
        ) from error


def render_chat(
    chat: Chat, templates: Templates, special_tokens: dict[str, Any], source: Source, known: set[tuple[object, ...]]
) -> Rendered | str:
    """The texts of a chat with the spans that count in the loss, or the reason why the chat cannot be used.

    The function runs in a ``LimitedProcess``. It therefore catches every exception of the template, and returns the
    reason instead of raising ``Skip``.

    Args:
        special_tokens: the tokenizer's ``special_tokens_map``, which templates read.
        source: its ``train_on`` and ``earlier_reasoning`` are read.
        known: the fields that the template was found to read in earlier chats; those of this one are added.
    """
    messages = chat.messages
    template = templates.plain if chat.tools is None else templates.tools
    marked = bool(_MARK.search(template))
    bare = partial(_render, template=template, special_tokens=special_tokens, tools=None)
    render = partial(bare, tools=chat.tools)
    try:
        found = _texts(messages, render, marked, source)
        unread = _unread(chat, render, bare, known)
    except Skip as skip:
        return str(skip)
    except Exception as error:  # a template may fail in any way
        return f"refused by the chat template: {reason_of(error)}"
    if sum(len(rendering.text) for rendering in found) > MAX_CHARACTERS:
        return str(too_long())
    learned = [rendering for rendering in found if any(first < last for first, last in rendering.spans)]
    if not learned and source.train_on == "response":
        return "no response begins where the chat template's generation prompt ends"
    return Rendered(learned, unread) if learned else "no turn counts"


def _texts(messages: list[Message], render: _Render, marked: bool, source: Source) -> list[Rendering]:
    """The texts of a chat. What counts in them is what ``train_on`` says, but for the turns that must not count."""
    learned = [counts(message) for message in messages]
    if source.train_on == "response":
        if not any(learned[turn] for turn in _responses(messages)):
            raise Skip("no response counts, by 'weight' or 'train'")
        if source.earlier_reasoning == "kept":
            return [_keeping(messages, render, marked, learned)]
        return _dropping(messages, render, marked, learned)
    if source.earlier_reasoning == "kept":
        masked = [not counted for counted in learned]
        if any(masked[turn] and (turn == 0 or messages[turn]["role"] != "assistant") for turn in range(len(messages))):
            raise Skip("a turn that must not count, and that the chat template does not show apart")
        text, spans = _keeping(messages, render, marked, masked)
    else:
        text, _ = render(messages, False)
        spans = [_turn(messages, turn, render, text) for turn, counted in enumerate(learned) if not counted]
    borders = [0, *(border for span in spans for border in span), len(text)]
    return [Rendering(text, list(zip(borders[::2], borders[1::2], strict=True)))]


def _turn(messages: list[Message], turn: int, render: _Render, text: str) -> tuple[int, int]:
    """The part of the text of a whole chat that a turn adds to it."""
    before = render(messages[:turn], False).text if turn else ""
    until = render(messages[: turn + 1], False).text
    if not (until.startswith(before) and text.startswith(until)):
        raise Skip("a turn that must not count, and that the chat template does not show apart")
    return len(before), len(until)


def _dropping(messages: list[Message], render: _Render, marked: bool, learned: list[bool]) -> list[Rendering]:
    """The texts of ``dropped``: each response stands in the context that the template shows when it is written.

    Args:
        learned: for each message, whether it may count.
    """
    found: list[Rendering] = []
    for turn in _responses(messages):
        _, now = _written(messages, turn, render, marked)
        if not learned[turn]:
            now = Rendering(now.text, [])
        if found and now.text.startswith(found[-1].text):
            now = Rendering(now.text, found.pop().spans + now.spans)
        found.append(now)
    return found


def _keeping(messages: list[Message], render: _Render, marked: bool, learned: list[bool]) -> Rendering:
    """The text of ``kept``: all responses as they were written, with the template's text between them.

    Its spans are those of the responses that ``learned`` says.
    """
    text, spans = "", list[tuple[int, int]]()
    last = None  # the last response so far
    for turn in _responses(messages):
        begin, now = _written(messages, turn, render, marked)
        if last is not None and not now.spans:
            raise Skip(_CANNOT_KEEP)
        text += now.text[:begin] if last is None else _between(messages, last, turn, text, render, marked)
        shift = len(text) - begin
        spans += [(first + shift, end + shift) for first, end in now.spans if learned[turn]]
        text, last = text + now.text[begin:], turn
    return Rendering(text, spans)


def _unread(chat: Chat, render: _Render, bare: _Render, known: set[tuple[object, ...]]) -> list[str]:
    """The fields of the messages up to the last response, and the tools, without which the template writes the same.

    Args:
        bare: renders without the tools.

    Raises:
        Skip: the template reads nothing of a message.
    """
    responses = _responses(chat.messages)
    found = []
    if chat.tools and ("tools",) not in known:
        first = chat.messages[: responses[0] + 1]
        if _same(bare, first, render, first):
            found.append("'tools' of chats")
        else:
            known.add(("tools",))
    for turn, message in enumerate(chat.messages[: responses[-1] + 1]):
        fields = [key for key, value in message.items() if value not in (None, "", [], {})]
        fields = [key for key in fields if key not in ("role", "weight", "train")]
        if fields == ["content"]:
            continue
        end = next(response for response in responses if response >= turn) + 1
        lost = []
        for field in fields:
            key = (message["role"], field, *sorted(fields))
            if key not in known:
                less = {name: value for name, value in message.items() if name != field}
                less |= {"content": ""} if field == "content" else {}
                until = chat.messages[:end]
                if _same(render, until, render, [*until[:turn], less, *until[turn + 1 :]]):
                    lost.append(field)
                else:
                    known.add(key)
        if lost and len(lost) == len(fields) and "content" not in fields:
            raise Skip(f"a message of which the chat template reads nothing: {', '.join(map(repr, sorted(lost)))}")
        found += [f"{field!r} of {message['role']} messages" for field in lost]
    return found


def _same(one: _Render, messages: list[Message], other: _Render, others: list[Message]) -> bool:
    """Whether two renderings are the same text. One that fails is another text."""
    try:
        return one(messages, False).text == other(others, False).text
    except Exception:  # a template may fail in any way
        return False


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
    until = [*messages[:last], messages[last] | {"content": _PLACEHOLDER}]
    alone = render(until, False).text.split(_PLACEHOLDER)
    followed = render([*until, *messages[last + 1 : turn]], not marked).text.split(_PLACEHOLDER)
    if len(alone) != 2 or len(followed) != 2 or not (text.endswith(alone[1]) and followed[1].startswith(alone[1])):
        raise Skip(_CANNOT_KEEP)
    return followed[1].removeprefix(alone[1])


def _render(
    messages: list[Message],
    generation_prompt: bool,
    template: str,
    special_tokens: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> Rendering:
    rendered: Any = render_jinja_template(
        conversations=[messages],  # type: ignore[arg-type]
        tools=tools,  # type: ignore[arg-type]
        chat_template=template,
        return_assistant_tokens_mask=bool(_MARK.search(template)),
        add_generation_prompt=generation_prompt,
        **special_tokens,
    )
    texts, marks = rendered
    return Rendering(texts[0], marks[0] if marks else [])
