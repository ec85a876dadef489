"""Says which rank holds which routed expert. No other file computes a rank or a slot from an expert's number."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Which rank of an expert-parallel group holds each expert.

    An expert's *number* is the one that the router, its scores and biases, and the files on disk use. Its *slot* is its
    place among the experts of its rank. Its *position* is ``rank * slots + slot``. Rows are sent in the order of
    positions.

    Args:
        ranks: how many ranks share the experts; it divides ``experts``.
        order: the number of the expert at each position, a permutation. None is the order of numbers, in which each
            rank holds a contiguous range.
    """

    experts: int
    ranks: int
    order: tuple[int, ...] | None = None

    @property
    def slots(self) -> int:
        """How many experts each rank holds."""
        return self.experts // self.ranks

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of the expert at each position."""
        return tuple(range(self.experts)) if self.order is None else self.order

    def position(self, expert: int) -> int:
        """The position of an expert."""
        return expert if self.order is None else self._positions[expert]

    def rank(self, expert: int) -> int:
        """The rank that holds an expert."""
        return self.position(expert) // self.slots

    def slot(self, expert: int) -> int:
        """The place of an expert among those of its rank."""
        return self.position(expert) % self.slots

    def positions(self, experts: Tensor) -> Tensor:
        """The positions of the experts with these numbers, in the same shape (any shape) and dtype."""
        if self.order is None:
            return experts
        return self._on(experts.device)[0][experts.long()].to(experts.dtype)

    def by_position(self, values: Tensor) -> Tensor:
        """Reorder one value for each expert, ``[experts]``, from the order of numbers to the order of positions."""
        return values if self.order is None else values[self._on(values.device)[1]]

    def swapped(self, one: int, other: int) -> "Placement":
        """The placement in which two experts have exchanged their places."""
        exchanged = {one: other, other: one}
        order = tuple(exchanged.get(expert, expert) for expert in self.numbers)
        return Placement(self.experts, self.ranks, order)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {expert: position for position, expert in enumerate(self.numbers)}

    @cached_property
    def _tensors(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The position of each expert and the expert at each position, int64 ``[experts]``.

        They are kept on the device, because every forward pass needs them and a copy would make the host wait.
        """
        if device not in self._tensors:
            numbers = torch.tensor(self.numbers)
            self._tensors[device] = numbers.argsort().to(device), numbers.to(device)
        return self._tensors[device]
