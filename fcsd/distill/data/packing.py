"""Which tokens of which documents make up row ``i``, from the documents' lengths alone.

There are two ways to fill rows of ``seq_len`` tokens. ``Stream`` lays the documents end to end and cuts them anywhere:
it loses no token and needs no padding, but the second part of a cut document lacks its beginning. ``Bins`` keeps
documents whole, as chats need it: each document goes into the fullest row that still has room for it, and the rest of
a row is padding.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

# number of a document, its first token in the row, its last token in the row, exclusive
Piece = tuple[int, int, int]


class Stream:
    """Documents end to end, shuffled again in each epoch; in their own order if ``seed`` is None.

    Args:
        lengths: ``[documents]`` int64, the tokens of each document.

    Attributes:
        per_epoch: the number of rows that hold every document once; the last tokens that do not fill a row are left
            out.
        tokens: the number of tokens in these rows, padding excluded.
    """

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: Sequence[int] | None) -> None:
        self.per_epoch = int(lengths.sum()) // seq_len
        self.tokens = self.per_epoch * seq_len
        self._lengths, self._seq_len, self._seed = lengths, seq_len, seed
        self._epoch = lru_cache(maxsize=2)(self._lay_out)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in the epoch's order, and where each ends when they are laid end to end."""
        order = _order(np.flatnonzero(self._lengths), self._seed, epoch)
        return order, np.cumsum(self._lengths[order])

    def pieces(self, number: int) -> Iterator[Piece]:
        """The pieces of documents that fill a row, in order."""
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
    """One piece of each document, which is kept whole. Rows are filled once and shuffled again in each epoch.

    Args:
        firsts: ``[documents]`` int64, where the piece of each document begins.
        lengths: ``[documents]`` int64, the tokens of each piece, at most ``seq_len``; 0 leaves a document out.

    Attributes:
        per_epoch, tokens: see ``Stream``.
    """

    def __init__(self, firsts: np.ndarray, lengths: np.ndarray, seq_len: int, seed: Sequence[int] | None) -> None:
        self._firsts, self._lengths = firsts, lengths
        self.tokens = int(lengths.sum())
        order = _order(np.flatnonzero(lengths), seed)
        row_of = _best_fit(self._lengths[order], seq_len)
        by_row = np.argsort(row_of, kind="stable")
        self.per_epoch = int(row_of.max(initial=-1)) + 1
        self._order = order[by_row]
        self._starts = np.searchsorted(row_of[by_row], np.arange(self.per_epoch + 1))
        self._epoch = lru_cache(maxsize=2)(lambda epoch: _order(np.arange(self.per_epoch), seed, epoch))

    def pieces(self, number: int) -> Iterator[Piece]:
        """As ``Stream.pieces``; together the pieces may be shorter than a row."""
        epoch, place = divmod(number, self.per_epoch)
        row = int(self._epoch(epoch)[place])
        for document in self._order[self._starts[row] : self._starts[row + 1]]:
            first = int(self._firsts[document])
            yield int(document), first, first + int(self._lengths[document])


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The row of each document, ``[documents]`` int64, if each goes into the row where it leaves the least room."""
    row_of = np.empty_like(lengths)
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # [n]: the rows that have room for just n tokens
    rooms = 0  # bit n is set if there is such a row
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
    """The items in the order of an epoch; without an epoch, in the order that all epochs share."""
    return items if seed is None else np.random.default_rng([*seed, *epoch]).permutation(items)
