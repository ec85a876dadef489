"""Computes in one process what a quantised all-reduce returns: the slow reference of ``quantised``.

The functions follow the definition of the collective, and share no code with it but the formats themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fcsd.kernels.bit_split import Format, decode, encode

# What the wire makes of rows ``[n, width]``: the values that arrive, fp32 ``[n, width]``.
Rounding = Callable[[Tensor], Tensor]


def rounding_of(format: Format) -> Rounding:
    """The values that arrive if rows are encoded in ``format`` and decoded again.

    The function raises ``ConfigError`` for rows that the groups of the format do not divide.
    """
    return lambda rows: decode(encode(rows, format), format, rows.shape[1], torch.float32)


def simulate_all_reduce(partials: Tensor, format: Format | Rounding, node_size: int | None = None) -> Tensor:
    """The sum of partial sums ``[ranks, ..., width]`` over a quantised wire: ``[..., width]`` of the same dtype.

    Source: FlashCommunication V2, section 4. In two steps, every rank's values are rounded, added in fp32 in the order
    of ranks, and the sum is rounded for its way back. With ``node_size``, the sum inside each node is rounded once more
    before it is added to those of the other nodes, in the order of nodes.

    Args:
        partials: what each rank holds.
        format: the format of the wire, or the function that rounds rows.
        node_size: how many ranks one node has, for the hierarchical all-reduce; None for two steps among all ranks.

    Raises:
        ConfigError: the groups of the format do not divide the rows.
    """
    rounding = rounding_of(format) if isinstance(format, Format) else format
    rows = [one.reshape(-1, partials.shape[-1]) for one in partials]
    nodes = [rows] if node_size is None else [rows[n : n + node_size] for n in range(0, len(rows), node_size)]
    sums = [_added([rounding(one) for one in node]) for node in nodes]
    total = sums[0] if node_size is None else _added([rounding(one) for one in sums])
    return rounding(total).to(partials.dtype).view(partials.shape[1:])


def _added(summands: list[Tensor]) -> Tensor:
    """The sum in fp32, from the first summand to the last."""
    total = summands[0]
    for one in summands[1:]:
        total = total + one
    return total
