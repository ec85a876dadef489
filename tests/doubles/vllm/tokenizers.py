"""Tokenizers, as transformers has them."""

from typing import Any


def get_tokenizer(path: str, *, tokenizer_mode: str, trust_remote_code: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
