"""A text or a chat -> its tokens, and which of them count in the loss.

Of a plain text every token counts, its EOS included. A chat is what its template makes of it, nothing added. Its
responses are what the template marks with ``{% generation %}``; without marks, a response is what an assistant
message adds to the rendering of all before it, generation prompt included. A turn whose rendering later turns change
(Qwen3 drops the reasoning of earlier answers) is one the model would never have written in this context: it stays
as context and does not count.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from fcsd.config import Source
from fcsd.distill.data.records import Message, Skip
from fcsd.errors import BadInputError, ConfigError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# token ids, and for each whether it counts
Tokens = tuple[list[int], list[bool]]


def read_template(source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template of a source.

    Raises:
        ConfigError: its file cannot be read.
        BadInputError: it names none and neither does the tokenizer.
    """
    if source.chat_template is not None:
        try:
            return Path(source.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source.chat_template}: cannot be read as a chat template: {error}") from error
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise BadInputError(
            f"{source.path}: the tokenizer of {tokenizer.name_or_path} has no chat template",
            hint="name a Jinja file with `chat_template:`",
        ) from error


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of a plain text and EOS, all of which count."""
    ids: Any = [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]  # type: ignore[misc]
    return ids, [True] * len(ids)


def encode_chat(messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str, train_on: str) -> Tokens:
    """The tokens of a rendered chat; with ``train_on`` ``all`` they all count, else those of the responses.

    Raises:
        Skip: the template refuses the chat, or no response can be told from the rest.
    """
    try:
        if train_on == "response" and _GENERATION.search(template):
            marked: Any = tokenizer.apply_chat_template(
                messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, counts = marked["input_ids"], list(map(bool, marked["assistant_masks"]))
        else:
            rendered = _render(messages, tokenizer, template)
            spans = [(0, len(rendered))] if train_on == "all" else list(_responses(messages, tokenizer, template))
            encoded: Any = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
            inside = [(first <= starts) & (starts < last) for first, last in spans]
            ids, counts = encoded["input_ids"], np.any(inside, axis=0).tolist() if inside else []
    except (jinja2.TemplateError, TypeError) as error:
        raise Skip(f"refused by the chat template: {str(error).strip().splitlines()[0]:.80}") from error
    if not any(counts):
        raise Skip("no response keeps its rendering in the whole chat")
    return ids, counts


def _responses(messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str) -> Iterator[tuple[int, int]]:
    """First and last character, exclusive, of each response in the rendered chat."""
    rendered = _render(messages, tokenizer, template)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant" and turn > 0:
            before = _render(messages[:turn], tokenizer, template, add_generation_prompt=True)
            after = _render(messages[: turn + 1], tokenizer, template)
            if rendered.startswith(after) and after.startswith(before):
                yield len(before), len(after)


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str, **options: Any) -> str:
    rendered: Any = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    return rendered
