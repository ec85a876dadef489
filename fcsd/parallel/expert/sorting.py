"""Sorts rows by the number of their expert, with keys of as few bytes as hold the numbers.

On a GPU a radix sort passes over all keys once for each byte of a key, and the host launches each pass. Numbers of
experts are small, so keys of one byte usually do.
"""

import torch
from torch import Tensor


def stable_order(numbers: Tensor, count: int) -> Tensor:
    """The places of ``numbers`` in ascending order; equal numbers keep their order.

    Args:
        numbers: integers from 0 to ``count - 1``, ``[n]``.
        count: how many different numbers there may be.

    Returns: int64 ``[n]``.
    """
    dtype = torch.uint8 if count <= 2**8 else torch.int16 if count <= 2**15 else torch.int64
    return torch.argsort(numbers.to(dtype), stable=True)
