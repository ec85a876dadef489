"""Documents -> rows of exactly ``seq_len`` tokens, any of which can be computed from its number alone.

Rows of several corpora are mixed by weight. Row ``i`` of a run depends on the seed, the data and the tokenizer
only: not on ranks, accumulation or where the run was resumed.

Inside a row position ids restart at 0 with every document. With no attention mask and no cache, transformers
reads the restart as a document boundary and attention stays within it; labels do not cross it either. Padding is one
more document, no token of which counts.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fcsd.distill.data.corpus import Corpus
from fcsd.distill.data.packing import Bins, Stream
from fcsd.distill.losses import IGNORE
from fcsd.errors import BadInputError
from fcsd.kernels.packed_attention import document_borders

# token ids and position ids [seq_len] int64, and which tokens count [seq_len] bool
Row = tuple[np.ndarray, np.ndarray, np.ndarray]


class Rows:
    """The packed rows of one corpus: endless, reshuffled each epoch; in file order if ``seed`` is None."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: Sequence[int] | None = None) -> None:
        self._corpus, self._seq_len = corpus, seq_len
        self._count_up = np.arange(seq_len)
        if corpus.overlong == "split":
            self._layout = Stream(corpus.lengths, seq_len, seed)
        else:
            fitting = np.where(corpus.lengths > seq_len, 0, corpus.lengths)
            self._layout = Bins(fitting if corpus.overlong == "skip" else corpus.lengths, seq_len, seed)
        self.per_epoch = self._layout.per_epoch
        if self.per_epoch == 0:
            raise BadInputError(
                f"{corpus.name}: {corpus.tokens} tokens do not fill one row of {seq_len}",
                hint="give more text or lower data.seq_len",
            )

    def __getitem__(self, number: int) -> Row:
        ids = np.full(self._seq_len, self._corpus.padding, dtype=np.int64)
        counts = np.zeros(self._seq_len, dtype=np.bool_)
        positions = np.empty(self._seq_len, dtype=np.int64)
        filled = 0
        for document, first, last in self._layout.pieces(number):
            until = filled + last - first
            ids[filled:until], counts[filled:until] = self._corpus.piece(document, first, last)
            positions[filled:until] = self._count_up[: last - first]
            filled = until
        positions[filled:] = self._count_up[: self._seq_len - filled]
        return ids, positions, counts


class Mixture:
    """The rows of a whole run, drawn from several corpora in proportion to their weights."""

    def __init__(self, corpora: Sequence[Rows], weights: Sequence[float], rows: int, seed: int) -> None:
        shares = np.asarray(weights) / np.sum(weights)
        self._corpora = corpora
        self._corpus = np.random.default_rng(seed).choice(len(corpora), size=rows, p=shares)
        self._number = np.empty(rows, dtype=np.int64)
        for which in range(len(corpora)):
            drawn = self._corpus == which
            self._number[drawn] = np.arange(drawn.sum())

    def __getitem__(self, number: int) -> Row:
        """As ``Rows.__getitem__``, for a row of the run."""
        return self._corpora[self._corpus[number]][int(self._number[number])]


def batch(rows: Rows | Mixture, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
    """``input_ids``, ``position_ids``, ``labels`` of the rows so numbered, each ``[batch, seq_len]`` int64.

    ``borders``, ``[documents + 1]`` int32, says where documents begin when the rows are laid end to end. A label is
    the token its position predicts; ``IGNORE`` where that token does not count, and at the last position of a document
    or row.
    """
    packed = [rows[number] for number in numbers]
    input_ids, position_ids, counts = (torch.from_numpy(np.stack(column)) for column in zip(*packed, strict=True))
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, :-1] = input_ids[:, 1:].masked_fill((position_ids[:, 1:] == 0) | ~counts[:, 1:], IGNORE)
    borders = document_borders(position_ids)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "borders": borders}
