"""Loads the tokenizer of a model directory, and decides which special tokens a text has when a model reads it.

Tokenizers differ: some put BOS before a text (``add_bos_token``), some append EOS (``add_eos_token``), some do neither.
A text that a model continues or scores, and the text of a training document, begin with what the tokenizer puts before
a text, once. They never end with what it appends. A training document ends with one token that ends documents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What holds the vocabulary of a tokenizer in the formats that transformers reads.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def tokenizer_file(path: Path) -> str | None:
    """The name of the file in a model directory that holds the tokenizer's vocabulary; None if there is none."""
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".model", ".tiktoken"))
    return next((name for name in (*_VOCABULARIES, *others) if (path / name).is_file()), None)


def load_tokenizer(model: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model directory. Code in the directory is not run.

    Raises:
        BadInputError: the directory has no tokenizer, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # the libraries do not check the files, and fail in any way on those of another form
        raise BadInputError(
            f"{model}: there is no usable tokenizer ({reason_of(error)})",
            "Copy tokenizer.json and tokenizer_config.json of the model into this directory.",
        ) from error


def tokens_before(tokenizer: Any, texts: Sequence[str] = ()) -> list[int]:
    """The special tokens that a tokenizer puts before a text: mostly BOS or nothing.

    Args:
        texts: texts to find it out by if the tokenizer has no token for the letter a.
    """
    for text in ("a", *texts):
        bare, full = (list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (False, True))
        if bare:
            starts = range(len(full) - len(bare) + 1)
            return full[: next((start for start in starts if full[start : start + len(bare)] == bare), 0)]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []


def text_ids(texts: Sequence[str], tokenizer: Any, special: bool | None = None) -> list[list[int]]:
    """The token ids of texts as a model reads them: see the top of this file.

    Args:
        special: whether the tokenizer's tokens come before a text. None puts them there unless the text has them.
    """
    if not texts:
        return []
    bare = [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    before = [] if special is False else tokens_before(tokenizer, texts)
    return [[*before, *ids] if special or not count_before(ids, before, tokenizer) else ids for ids in bare]


def count_before(ids: Sequence[int], before: Sequence[int], tokenizer: Any) -> int:
    """How many special tokens come before a text in ``ids``: those of ``before`` (see ``tokens_before``), or a BOS."""
    if before and list(ids[: len(before)]) == list(before):
        return len(before)
    return int(list(ids[:1]) == [tokenizer.bos_token_id])


def document_ids(text: str, tokenizer: Any, before: Sequence[int], end: int) -> list[int]:
    """The token ids of a training document: ``before`` (see ``tokens_before``), the text, and ``end`` once."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    start = [] if count_before(ids, before, tokenizer) else before
    return [*start, *ids, *([] if ids[-1:] == [end] else [end])]
