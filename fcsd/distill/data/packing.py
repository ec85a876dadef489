"""Decides from the documents' lengths which tokens of which documents make up a row.

There are two ways to fill rows of ``seq_len`` tokens. ``Stream`` concatenates the documents and cuts them at any
position. It loses no token and needs no padding, but the second part of a cut document lacks its beginning. ``Bins``
keeps documents whole, which chats need. Each document goes into the fullest row that still has room for it, and the
rest of a row is padding.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

# number of a document, the first of its tokens in the row, the end of its tokens in the row (exclusive)
Piece = tuple[int, int, int]


class Stream:
    """Concatenated documents, which are shuffled again in each epoch.

    Args:
        lengths: ``[documents]`` int64, the number of tokens of each document.
        seed: the seed of the shuffling; None keeps the documents in their own order.

    Attributes:
        per_epoch: the number of rows that hold every document once. The last tokens, which do not fill a row, are left
            out.
        tokens: the number of tokens in these rows, without padding.
    """

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: Sequence[int] | None) -> None:
        self.per_epoch = int(lengths.sum()) // seq_len
        self.tokens = self.per_epoch * seq_len
        self._lengths, self._seq_len, self._seed = lengths, seq_len, seed
        self._epoch = lru_cache(maxsize=2)(self._lay_out)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in the order of an epoch, and the position of each one's end when they are concatenated."""
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
        firsts: ``[documents]`` int64, the first token of the piece of each document.
        lengths: ``[documents]`` int64, the number of tokens of each piece, at most ``seq_len``. A document with 0 is
            left out.
        seq_len, seed: see ``Stream``.

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
        """Like ``Stream.pieces``, but the pieces together may be shorter than a row."""
        epoch, place = divmod(number, self.per_epoch)
        row = int(self._epoch(epoch)[place])
        for document in self._order[self._starts[row] : self._starts[row + 1]]:
            first = int(self._firsts[document])
            yield int(document), first, first + int(self._lengths[document])


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The row of each document, ``[documents]`` int64. Each goes into the row where it leaves the least room."""
    row_of = np.empty_like(lengths)
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # [n]: the rows with room for exactly n tokens
    rooms = 0  # bit n is set if with_room[n] is not empty
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
    """The items in the order of an epoch. Without an epoch, the order depends on the seed alone."""
    return items if seed is None else np.random.default_rng([*seed, *epoch]).permutation(items)
