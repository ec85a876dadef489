"""Finds the token that ends a plain-text document, which is not always the tokenizer's EOS.

The tokenizer of a model that was tuned for chats mostly has the end of a turn as its EOS. Documents ended with another
token when the model was trained on text, and it must not unlearn that.
"""

from pathlib import Path
from typing import Any, NamedTuple

from fcsd.checkpoint.files import contained, read_object
from fcsd.errors import BadInputError, ConfigError

_GENERATION = "generation_config.json"
_NAMES = ("<|endoftext|>", "<|end_of_text|>")  # what this token is called where it is not the end of a turn as well


class DocumentEnd(NamedTuple):
    """The token at the end of each plain-text document: its id, its text, and why it is this one."""

    id: int
    text: str
    why: str


def document_end(wanted: str | None, model: Path, tokenizer: Any, vocab_size: int) -> DocumentEnd:
    """The token that ends the documents of a run.

    Args:
        wanted: the field ``data.document_end``. None takes the tokenizer's EOS, unless its chat template writes that
            token. Then it takes a token that the chat template does not write: one with a name of ``_NAMES``, at
            which the generation config ends text or which is a special token of the tokenizer; else another one at
            which the generation config ends text; else the EOS all the same.
        model: the model's directory, with its ``generation_config.json`` if it has one.
        tokenizer: its tokenizer, with an EOS.

    Raises:
        ConfigError: ``wanted`` is not a token of the model.
        BadInputError: the generation config is damaged.
    """
    if wanted is not None:
        found = tokenizer.get_vocab().get(wanted)
        if found is None or found >= vocab_size:
            known = ", ".join(dict.fromkeys(map(str, tokenizer.all_special_tokens)))
            raise ConfigError(
                f"data.document_end: {wanted!r} is not a token of the model", f"Its special tokens are: {known}"
            )
        return DocumentEnd(found, wanted, "data.document_end")
    eos = DocumentEnd(tokenizer.eos_token_id, tokenizer.eos_token, "the tokenizer's EOS")
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):  # several
        template = "\n".join(template.values())
    if eos.text not in template and "eos_token" not in template:
        return eos
    others = [DocumentEnd(id_, _token(id_, tokenizer), f"{_GENERATION} ends text at it") for id_ in _ends(model)]
    named = [name for name in _NAMES if name in tokenizer.all_special_tokens]
    others += [DocumentEnd(tokenizer.get_vocab()[name], name, "a special token of the tokenizer") for name in named]
    others = [
        end for end in others if end.text and end.text not in template and end.id != eos.id and end.id < vocab_size
    ]
    return min(others, key=lambda end: end.text not in _NAMES, default=eos)


def _ends(model: Path) -> list[int]:
    """The token ids at which the generation config ends a text; none without such a file.

    Raises:
        BadInputError: the file is damaged.
    """
    if not (model / _GENERATION).exists():
        return []
    ends = read_object(contained(model, _GENERATION)).get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise BadInputError(f"{model / _GENERATION}: eos_token_id holds something else than token ids")
    return ends


def _token(number: int, tokenizer: Any) -> str:
    """The text of a token; empty if there is none of this number."""
    return tokenizer.convert_ids_to_tokens(number) or "" if number < len(tokenizer) else ""
