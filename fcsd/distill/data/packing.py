"""Which tokens of which documents make up row ``i``, from the documents' lengths alone.

Two ways to fill rows of ``seq_len`` tokens. ``Stream`` lays the documents end to end and cuts anywhere: no token is
lost or wasted, but the second half of a cut document has lost its beginning. ``Bins`` keeps documents whole, as a
chat needs it: each goes to the fullest row that still has room for it, and what no document fills is padding.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

# (document, its first token in the row, its last one, exclusive)
Piece = tuple[int, int, int]


class Stream:
    """Documents end to end, reshuffled each epoch; in their own order if ``seed`` is None.

    Args:
        lengths: ``[documents]`` int64.
    """

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: Sequence[int] | None) -> None:
        self.per_epoch = int(lengths.sum()) // seq_len
        self._lengths, self._seq_len, self._seed = lengths, seq_len, seed
        self._epoch = lru_cache(maxsize=2)(self._lay_out)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in the epoch's order, and where each ends when they are laid end to end."""
        order = _order(np.flatnonzero(self._lengths), self._seed, epoch)
        return order, np.cumsum(self._lengths[order])

    def pieces(self, number: int) -> Iterator[Piece]:
        """What fills a row, in order."""
        epoch, row = divmod(number, self.per_epoch)
        order, ends = self._epoch(epoch)
        start, stop = row * self._seq_len, (row + 1) * self._seq_len
        place = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            document, end = int(order[place]), min(stop, int(ends[place]))
            offset = int(self._lengths[document] - ends[place])
            yield document, start + offset, end + offset
            start, place = end, place + 1


class Bins:
    """Whole documents, those that are longer than a row cut to it; filled once, rows reshuffled each epoch."""

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: Sequence[int] | None) -> None:
        self._lengths = np.minimum(lengths, seq_len)
        order = _order(np.flatnonzero(lengths), seed)
        row_of = _best_fit(self._lengths[order], seq_len)
        by_row = np.argsort(row_of, kind="stable")
        self.per_epoch = int(row_of.max(initial=-1)) + 1
        self._order = order[by_row]
        self._starts = np.searchsorted(row_of[by_row], np.arange(self.per_epoch + 1))
        self._epoch = lru_cache(maxsize=2)(lambda epoch: _order(np.arange(self.per_epoch), seed, epoch))

    def pieces(self, number: int) -> Iterator[Piece]:
        """As ``Stream.pieces``; together they may be shorter than a row."""
        epoch, place = divmod(number, self.per_epoch)
        row = int(self._epoch(epoch)[place])
        for document in self._order[self._starts[row] : self._starts[row + 1]]:
            yield int(document), 0, int(self._lengths[document])


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The row of each document when it goes where the least room remains; ``[documents]`` int64."""
    row_of = np.empty_like(lengths)
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # the rows with so many tokens of room
    rooms = 0  # bit n is set where some row has room for n tokens
    rows = 0
    for place, length in enumerate(lengths.data):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            row, room, rows = rows, seq_len, rows + 1
        row_of[place] = row
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    return row_of


def _order(items: np.ndarray, seed: Sequence[int] | None, *epoch: int) -> np.ndarray:
    """The items as an epoch shuffles them; without one, as they are shuffled once and for all."""
    return items if seed is None else np.random.default_rng([*seed, *epoch]).permutation(items)
