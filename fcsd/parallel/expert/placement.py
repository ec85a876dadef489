"""Says which rank holds which routed expert. No other file computes a rank or a slot from an expert's number."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Which rank of an expert-parallel group holds each expert: contiguous ranges, in the order of ranks.

    An expert's *number* is the one that the router, its scores and biases, and the files on disk use. Its *slot* is its
    place among the experts of its rank. Its *position* is ``rank * slots + slot``. Rows are sent in the order of
    positions.

    Args:
        experts: how many experts the layer has.
        ranks: how many ranks share the experts; it divides ``experts``.
    """

    experts: int
    ranks: int

    @property
    def slots(self) -> int:
        """How many experts each rank holds."""
        return self.experts // self.ranks

    def rank(self, expert: int) -> int:
        """The rank that holds an expert."""
        return expert // self.slots

    def slot(self, expert: int) -> int:
        """The place of an expert among those of its rank."""
        return expert % self.slots

    def positions(self, experts: Tensor) -> Tensor:
        """The positions of the experts with these numbers, in the same shape (any shape)."""
        return experts  # with contiguous ranges the position is the number

    def by_position(self, values: Tensor) -> Tensor:
        """Reorder one value for each expert, ``[experts]``, from the order of numbers to the order of positions."""
        return values
