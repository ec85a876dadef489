"""Triton kernels, each with a torch reference that computes the same.

A plan counts the memory of the kernels in ``gated``, ``rows``, ``rotary`` and ``latent`` on the meta device. There they
allocate and keep the same tensors, and nothing is computed.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Copies(NamedTuple):
    """Where the copies of each row go: one copy for each group that holds any of its experts.

    Attributes:
        row_of: ``[rows, most]``, the number of each copy; -1 where a row has fewer copies.
        entry_of: ``[rows, choices]``, the number ``copy * choices of a copy + entry`` of the entry that each choice
            becomes; -1 if the choice has no expert.
        experts: ``[rows, choices]``, the place of each expert in its group.
    """

    row_of: "Tensor"
    entry_of: "Tensor"
    experts: "Tensor"
