"""Where the routed experts of a layer are. Nothing else in fcsd computes a rank or a slot from an expert's number."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Which rank of an expert-parallel group holds each expert: contiguous ranges, in the order of ranks.

    An expert's *number* is the canonical one: that of the router, its scores and biases, and the files on disk. Its
    *slot* is its place among the experts of its rank. Its *position* is ``rank * slots + slot``: rows are sent in the
    order of positions.

    Args:
        experts: how many experts the layer has.
        ranks: how many ranks share them; divides ``experts``.
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
        """Numbers of experts, of any shape -> their positions."""
        return experts  # in contiguous ranges the position is the number

    def by_position(self, values: Tensor) -> Tensor:
        """One value for each expert ``[experts]``, in the order of numbers -> the same in the order of positions."""
        return values
