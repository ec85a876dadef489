"""Turns a text or a rendered chat into token ids, and marks the tokens that count in the loss.

In a plain text every token counts, including the token at its end. The rendering of a chat is tokenised as it is,
and no token is added to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from fcsd.checkpoint.tokenizer import document_ids
from fcsd.distill.data.chat_template import Rendering


class Document(NamedTuple):
    """A document as tokens.

    Attributes:
        ids: the token ids.
        counts: for each token, whether it counts in the loss.
    """

    ids: list[int]
    counts: list[bool]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, before: Sequence[int], end: int) -> Document:
    """The tokens of a plain text, with one ``end`` at its end. All of them count.

    Args:
        before: the special tokens that the tokenizer puts before a text; see ``tokens_before``.
        end: the token that ends a document; see ``fcsd.distill.data.document_end``.
    """
    ids = document_ids(text, tokenizer, before, end)
    return Document(ids, [True] * len(ids))


def encode_rendering(rendering: Rendering, tokenizer: PreTrainedTokenizerBase) -> Document:
    """The tokens of a rendered chat. A token counts if it begins inside a span that counts."""
    encoded: Any = tokenizer(rendering.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
    borders = np.array(rendering.spans, dtype=np.int64).ravel()  # ascending: begin and end of each span
    counts = np.searchsorted(borders, starts, side="right") % 2 == 1
    return Document(encoded["input_ids"], counts.tolist())
