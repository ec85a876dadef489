"""A real fast tokenizer without files, one token a character, and texts for it."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 2


def tokenizer() -> PreTrainedTokenizerFast:
    """One id per printable ASCII character; 0 pads, 1 is unknown, 2 ends a document."""
    vocab = {"<pad>": 0, "<unk>": 1, "<eos>": EOS, **{chr(c): c - 29 for c in range(32, 127)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def ids(text: str) -> list[int]:
    """What ``tokenizer()`` makes of printable ASCII text."""
    return [ord(c) - 29 for c in text]


def write_jsonl(path: Path, texts: list[object], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path
