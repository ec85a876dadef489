"""Documents -> rows of exactly ``seq_len`` tokens, any of which can be computed from its number alone.

The documents of a corpus are shuffled per epoch, laid end to end and cut into rows; rows of several corpora
are mixed by weight. Row ``i`` of a run depends on the seed, the data and the tokenizer only: not on ranks,
accumulation or where the run was resumed.

Inside a row position ids restart at 0 with every document. With no attention mask and no cache, transformers
reads the restart as a document boundary and attention stays within it; labels do not cross it either.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from fcsd.distill.corpus import Corpus
from fcsd.distill.losses import IGNORE
from fcsd.errors import BadInputError


class Rows:
    """The packed rows of one corpus: endless, reshuffled each epoch; in file order if ``seed`` is None."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: Sequence[int] | None = None) -> None:
        self.per_epoch = corpus.tokens // seq_len
        if self.per_epoch == 0:
            raise BadInputError(
                f"{', '.join(corpus.files)}: {corpus.tokens} tokens do not fill one row of {seq_len}",
                hint="give more text or lower data.seq_len",
            )
        self._corpus, self._seq_len, self._seed = corpus, seq_len, seed
        self._epoch = lru_cache(maxsize=2)(self._lay_out)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in the epoch's order, and where each ends when they are laid end to end."""
        order = np.flatnonzero(self._corpus.lengths)
        if self._seed is not None:
            order = np.random.default_rng([*self._seed, epoch]).permutation(order)
        return order, np.cumsum(self._corpus.lengths[order])

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and position ids of a row, each ``[seq_len]`` int64."""
        epoch, row = divmod(number, self.per_epoch)
        order, ends = self._epoch(epoch)
        start, stop = row * self._seq_len, (row + 1) * self._seq_len
        ids, positions = [], []
        for place in range(int(np.searchsorted(ends, start, side="right")), len(order)):
            document = self._corpus.document(int(order[place]))
            offset = start - (int(ends[place]) - len(document))
            ids.append(document[offset : offset + stop - start])
            positions.append(np.arange(len(ids[-1])))
            start += len(ids[-1])
            if start == stop:
                break
        return np.concatenate(ids, dtype=np.int64), np.concatenate(positions)


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

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As ``Rows.__getitem__``, for a row of the run."""
        return self._corpora[self._corpus[number]][int(self._number[number])]


def batch(rows: Rows | Mixture, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
    """``input_ids``, ``position_ids``, ``labels`` of the rows so numbered, each ``[batch, seq_len]`` int64.

    A label is the token its position predicts, ``IGNORE`` at the last position of a document or row.
    """
    packed = [rows[number] for number in numbers]
    input_ids, position_ids = (torch.from_numpy(np.stack(column)) for column in zip(*packed, strict=True))
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, :-1] = input_ids[:, 1:].masked_fill(position_ids[:, 1:] == 0, IGNORE)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
