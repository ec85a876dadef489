"""Computes in one process what a quantised all-reduce returns: the slow reference of
``fcsd.parallel.all_reduce.quantised``.

The functions follow the definition of the collective, and share no code with it but the formats themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fcsd.kernels.bit_split import Format, decode, encode

# What communication makes of rows ``[n, width]``: the values that arrive, ``[n, width]`` of any floating dtype.
Rounding = Callable[[Tensor], Tensor]


def rounding_of(format: Format) -> Rounding:
    """The values that arrive if rows are encoded in ``format`` and decoded again.

    The function raises ``ConfigError`` for rows that the groups of the format do not divide.
    """
    return lambda rows: decode(encode(rows, format), format, rows.shape[1], torch.float32)


def simulate_all_reduce(partials: Tensor, format: Format | Rounding) -> Tensor:
    """The sum of partial sums ``[ranks, ..., width]`` in quantised communication, of the same dtype: ``[..., width]``.

    Source: FlashCommunication V2, section 4. Every rank's values are rounded and added in fp32 in the order of ranks.
    Among more than two ranks the sum is rounded for its way back. Two ranks send each other all their values, so that
    no sum travels.

    Args:
        format: the format of the values sent, or the function that rounds rows.

    Raises:
        ConfigError: the groups of the format do not divide the rows.
    """
    rounding = rounding_of(format) if isinstance(format, Format) else format
    first, *others = (rounding(one.reshape(-1, partials.shape[-1])) for one in partials)
    total = first
    for one in others:
        total = total + one
    if len(partials) > 2:
        total = rounding(total)
    return total.to(partials.dtype).view(partials.shape[1:])
