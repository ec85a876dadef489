"""Moves experts between ranks in place: each rank sends the elements of an expert that it holds to their new holders.

The experts of a rank lie one after the other in the first dimension of a parameter. A rank holds all elements of the
parameter itself. Of the optimizer's fp32 weights and moments it may hold an interval only, because ZeRO divides them
among the ranks that have the same experts. Every rank knows the intervals of all ranks, so all ranks derive the same
list of pieces, and one all-to-all moves all pieces of a layer. Bytes are copied as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.parallel.expert.placement import Placement


class Interval(NamedTuple):
    """The elements from ``start`` to ``stop`` of a rank's experts, which lie one after the other."""

    start: int
    stop: int


class Share(NamedTuple):
    """What a rank holds of a tensor that has the elements of its experts.

    Attributes:
        start: the first element that the rank holds.
        values: contiguous ``[elements]``, the elements from ``start`` on.
    """

    start: int
    values: Tensor

    @property
    def interval(self) -> Interval:
        """The elements that the rank holds."""
        return Interval(self.start, self.start + len(self.values))


class Piece(NamedTuple):
    """Elements of one tensor that move from one rank to another; both are ranks of the whole run."""

    name: str
    source: int
    start: int  # the first element in the order of the source's experts
    goal: int
    goal_start: int  # the same element in the order of the goal's experts
    count: int


def plan(
    before: Placement, after: Placement, held: Sequence[Mapping[str, Interval]], sizes: Mapping[str, int]
) -> list[Piece]:
    """The pieces that move if ``after`` replaces ``before``, in the same order on every rank.

    Args:
        held: for each rank of the run the elements that it holds of each tensor, by the name of the tensor. A tensor is
            missing if the rank holds none of it. Neighbouring ranks divide the experts.
        sizes: how many elements an expert has in each tensor.
    """
    ranks, slots = before.ranks, before.slots
    moved = [(before.position(e), after.position(e)) for e in range(before.experts)]
    moved = [(old, new) for old, new in moved if old != new]
    found = []
    for name, size in sizes.items():
        for goal, mine in enumerate(held):
            for old, new in moved:
                if name not in mine or new // slots != goal % ranks:
                    continue
                # Both placements count an expert's elements from the start of its slot.
                first, shift = new % slots * size, (old % slots - new % slots) * size
                start, stop = max(first, mine[name].start), min(first + size, mine[name].stop)
                wanted = Interval(start + shift, stop + shift)
                for source, part in _holders(wanted, old // slots, goal, ranks, [of.get(name) for of in held]):
                    found.append(Piece(name, source, part.start, goal, part.start - shift, part.stop - part.start))
    return found


def _holders(
    wanted: Interval, rank: int, goal: int, ranks: int, held: Sequence[Interval | None]
) -> Iterator[tuple[int, Interval]]:
    """The ranks of the run that hold the wanted elements of ``rank`` of an expert-parallel group.

    Several ranks hold all elements if nothing divides them. The one in the group of ``goal`` then sends.
    """
    own = goal // ranks * ranks + rank
    others = [source for source in range(rank, len(held), ranks) if source != own]
    missing = wanted.stop - wanted.start
    for source in (own, *others):
        interval = held[source]
        if missing <= 0 or interval is None:
            continue
        part = Interval(max(wanted.start, interval.start), min(wanted.stop, interval.stop))
        if part.start < part.stop:
            missing -= part.stop - part.start
            yield source, part


@torch.no_grad()
def move(shares: Mapping[str, Share], pieces: Sequence[Piece], rank: int, ranks: int) -> None:
    """Move the pieces of ``plan`` between the ranks of the run. Every rank calls this.

    Beside the tensors, a rank needs memory for the pieces that it sends and for those that it receives.
    """
    sent = sorted((piece for piece in pieces if piece.source == rank), key=lambda piece: piece.goal)
    received = sorted((piece for piece in pieces if piece.goal == rank), key=lambda piece: piece.source)
    sending = [_bytes(shares[piece.name], piece.start, piece.count) for piece in sent]
    targets = [_bytes(shares[piece.name], piece.goal_start, piece.count) for piece in received]
    device = next(iter(shares.values())).values.device
    outgoing = torch.cat([*sending, torch.empty(0, dtype=torch.uint8, device=device)])
    incoming = torch.empty(sum(map(len, targets)), dtype=torch.uint8, device=device)
    goals = [sum(len(part) for part, piece in zip(sending, sent, strict=True) if piece.goal == r) for r in range(ranks)]
    sources = [
        sum(len(part) for part, piece in zip(targets, received, strict=True) if piece.source == r) for r in range(ranks)
    ]
    dist.all_to_all_single(incoming, outgoing, sources, goals)
    for target, part in zip(targets, incoming.split([len(target) for target in targets]), strict=True):
        target.copy_(part)


def _bytes(share: Share, start: int, count: int) -> Tensor:
    """The bytes of ``count`` elements from ``start`` on, a view ``uint8 [bytes]``."""
    return share.values.narrow(0, start - share.start, count).view(torch.uint8)
