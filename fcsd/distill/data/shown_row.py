"""A packed row for people to read: its text, with a mark around what counts in the loss."""

import torch
from transformers import PreTrainedTokenizerBase

from fcsd.distill.data.corpus import Corpus
from fcsd.distill.data.rows import Rows, batch
from fcsd.distill.losses import IGNORE

_SHOWN = 1024  # tokens of a row


def show_first_row(corpus: Corpus, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> str:
    """How many positions of the first row count, and its text: ``⟦counts⟧``, ``|`` after a document."""
    data = {name: column[0] for name, column in batch(rows, [0]).items()}
    counts = torch.zeros_like(data["labels"], dtype=torch.bool)
    counts[1:] = data["labels"][:-1] != IGNORE  # a token counts where it is predicted
    ids, shown = data["input_ids"][:_SHOWN], counts[:_SHOWN]
    begins = (data["position_ids"][:_SHOWN] == 0).nonzero()[1:, 0]
    documents = zip(ids.tensor_split(begins), shown.tensor_split(begins), strict=True)
    text = "|".join(_text(*document, corpus, tokenizer) for document in documents)
    more = "" if len(counts) <= _SHOWN else " ..."
    return f"{int(counts.sum())} of {len(counts)} positions count, ⟦marked⟧; | ends a document\n{text}{more}"


def _text(ids: torch.Tensor, counts: torch.Tensor, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> str:
    if len(ids) > 1 and not counts.any() and bool((ids == corpus.padding).all()):
        return f"({len(ids)} of padding)"
    changes = counts.diff().nonzero()[:, 0] + 1
    runs = zip(ids.tensor_split(changes), counts.tensor_split(changes), strict=True)
    return "".join(f"⟦{tokenizer.decode(run)}⟧" if marks.any() else str(tokenizer.decode(run)) for run, marks in runs)
