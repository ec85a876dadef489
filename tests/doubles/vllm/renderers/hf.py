"""The chat template of a tokenizer."""

from typing import Any


def resolve_chat_template(tokenizer: Any, chat_template: None, tools: None, model_config: Any) -> str | None:
    return tokenizer.chat_template
