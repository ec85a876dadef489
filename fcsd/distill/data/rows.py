"""Packs documents into rows of exactly ``seq_len`` tokens. Any row can be computed from its number alone.

There are two ways to fill rows. ``Stream`` concatenates the documents and cuts them at any position. It loses no token
and needs no padding, but the second part of a cut document lacks its beginning. ``Bins`` keeps documents whole, which
chats need. Each document goes into the fullest row that still has room for it, and the rest of a row is padding.

Rows of several corpora are mixed by weight. Row ``i`` of a run depends only on the seed, the data, the tokenizer and
the recipe's section ``data``. It does not depend on ranks, accumulation, or where the run was resumed.

Position ids restart at 0 with every document of a row. Without an attention mask and a cache, transformers treats the
restart as a document boundary, and attention stays within the document. Labels do not cross the boundary either.
Padding is treated as one more document, in which no token counts.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch

from fcsd.distill.data.corpus import Corpus
from fcsd.distill.loss.losses import IGNORE
from fcsd.errors import BadInputError
from fcsd.kernels.packed_attention import document_borders

# token ids and position ids [seq_len] int64, and which tokens count [seq_len] bool
Row = tuple[np.ndarray, np.ndarray, np.ndarray]
# number of a document, the first of its tokens in the row, the end of its tokens in the row (exclusive)
Piece = tuple[int, int, int]


class Rows:
    """The packed rows of one corpus. There is a row for every number, because another epoch follows each epoch.

    Args:
        seed: the seed of the shuffling, which differs in each epoch; None keeps the order of the file.

    Attributes:
        per_epoch: the number of rows that hold every document once.
        filled: the share of the tokens in these rows that are not padding; 1.0 if documents are split over rows.
        counted: the share of the tokens in these rows that counts in the loss.

    Raises:
        BadInputError: the documents do not fill one row, or ``counted`` is below the corpus' ``min_counted``.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: Sequence[int] | None = None) -> None:
        self._corpus, self._seq_len = corpus, seq_len
        self._count_up = np.arange(seq_len)
        if corpus.overlong == "split":
            self._layout = Stream(corpus.lengths, seq_len, seed)
            counted = corpus.counted() * self._layout.tokens / corpus.tokens
        else:
            firsts, lengths, cut_away = _cut(corpus, seq_len)
            self._layout = Bins(firsts, lengths, seq_len, seed)
            counted = corpus.counted() - cut_away
        self.per_epoch = self._layout.per_epoch
        if self.per_epoch == 0:
            raise BadInputError(
                f"{corpus.name}: {corpus.tokens} tokens do not fill one row of {seq_len}",
                hint="give more text or lower data.seq_len",
            )
        self.filled = self._layout.tokens / (self.per_epoch * seq_len)
        self.counted = counted / (self.per_epoch * seq_len)
        if self.counted < corpus.min_counted:
            raise BadInputError(
                f"{corpus.name}: only {self.counted:.2%} of the tokens in its rows of {seq_len:,} count in the loss;"
                f" min_counted of this source is {corpus.min_counted:.2%}",
                hint="raise data.seq_len, or lower min_counted of the source if so few tokens are intended",
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

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the rows of the first epoch: of all tokens, of their documents, and of which of them count."""
        digest = hashlib.sha256()
        for number in range(self.per_epoch):
            for column in self[number]:
                digest.update(column.tobytes())
        return digest.hexdigest()


class Mixture:
    """The rows of a whole run, each drawn from one of several corpora at random.

    All rows have the same number of tokens, but a row of whole documents ends with padding, and not every token counts.
    The weights are the shares of the corpora in the quantity that ``weight_by`` names, on average over the run. The
    probability of a corpus is therefore proportional to its weight divided by the amount of that quantity in one of its
    rows.

    Args:
        rows: the number of rows of the run.
        weight_by: ``tokens`` for the tokens that the model reads, without padding; ``counted`` for the tokens that
            count in the loss; ``rows`` for rows, with padding.
    """

    def __init__(
        self,
        corpora: Sequence[Rows],
        weights: Sequence[float],
        rows: int,
        seed: int,
        weight_by: Literal["tokens", "counted", "rows"] = "tokens",
    ) -> None:
        held = {"tokens": [c.filled for c in corpora], "counted": [c.counted for c in corpora]}.get(weight_by, 1.0)
        drawn_by = np.asarray(weights) / held
        self._corpora = corpora
        self._corpus = np.random.default_rng(seed).choice(len(corpora), size=rows, p=drawn_by / np.sum(drawn_by))
        self._number = np.empty(rows, dtype=np.int64)
        for which in range(len(corpora)):
            drawn = self._corpus == which
            self._number[drawn] = np.arange(drawn.sum())

    def __getitem__(self, number: int) -> Row:
        """The row of the run with this number."""
        return self._corpora[self._corpus[number]][int(self._number[number])]


def batch(
    rows: Rows | Mixture | Sequence[Row], numbers: Iterable[int], drafts: bool = False
) -> dict[str, torch.Tensor]:
    """``input_ids``, ``position_ids`` and ``labels`` of the rows with these numbers, each ``[batch, seq_len]`` int64.

    ``borders``, ``[documents + 1]`` int32, holds the position of the first token of each document in the concatenated
    rows, and the end of the last document. The label of a position is the next token. It is ``IGNORE`` where that token
    does not count, and at the last position of a document or row; for a draft head (``drafts``) also at the first one,
    whose hidden state it cannot guess.
    """
    packed = [rows[number] for number in numbers]
    input_ids, position_ids, counts = (torch.from_numpy(np.stack(column)) for column in zip(*packed, strict=True))
    labels = torch.full_like(input_ids, IGNORE)
    labels[:, :-1] = input_ids[:, 1:].masked_fill((position_ids[:, 1:] == 0) | ~counts[:, 1:], IGNORE)
    if drafts:
        labels.masked_fill_(position_ids == 0, IGNORE)
    borders = document_borders(position_ids)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "borders": borders}


def _cut(corpus: Corpus, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Chooses one piece of each document that fits into a row.

    Returns: the first token of each piece and its number of tokens, both ``[documents]`` int64, with 0 tokens for a
        document that is left out; and the number of tokens that count but lie outside the pieces.
    """
    firsts, lengths, cut_away = np.zeros_like(corpus.lengths), corpus.lengths.copy(), 0
    for number in np.flatnonzero(corpus.lengths > seq_len):
        _, counts = corpus.document(int(number))
        first, last = (0, 0) if corpus.overlong == "skip" else _window(counts, seq_len)
        firsts[number], lengths[number] = first, last - first
        cut_away += int(counts.sum()) - int(counts[first:last].sum())
    return firsts, lengths, cut_away


def _window(counts: np.ndarray, seq_len: int) -> tuple[int, int]:
    """The first token and the end (exclusive) of the part of a long document that goes into a row.

    The part must contain the first response, or the first half row of it. It begins at the beginning of the document
    if this is possible, and otherwise as early as possible. It ends with its last token that counts.

    Args:
        counts: ``[tokens]`` bool, more than ``seq_len``; at least one token counts.
    """
    counted = np.flatnonzero(counts)
    gaps = np.flatnonzero(np.diff(counted) > 1)
    response = counted[: gaps[0] + 1] if len(gaps) else counted
    needed = min(int(response[-1]) + 1, int(response[0]) + seq_len // 2)
    first = max(0, needed - seq_len)
    return first, int(counted[counted < first + seq_len][-1]) + 1


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
