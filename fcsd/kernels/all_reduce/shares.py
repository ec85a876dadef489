"""Sums one rank's share of values that have arrived from all ranks: a Triton kernel, and its reference in torch."""

from typing import Any

import torch
from torch import Tensor

_TILE, _BLOCKS = 4096, 64


def sum_share(own: Tensor, arrived: Tensor, me: int, out: Tensor) -> None:
    """Add the shares of all ranks in fp32, in the order of ranks, and write the sum to ``own`` and to ``out``.

    Args:
        own: this rank's summand ``[n]``.
        arrived: the summands by rank, ``[ranks, at least n]`` with contiguous rows; the row ``me`` is not read.
        me: this rank.
        out: ``[n]``.
    """
    if not len(own):
        return
    (launch if own.is_cuda else sum_share_reference)(own, arrived, me, out)


def sum_share_reference(own: Tensor, arrived: Tensor, me: int, out: Tensor) -> None:
    """``sum_share`` in torch."""
    total = torch.zeros_like(own, dtype=torch.float32)
    for rank, summand in enumerate(arrived):
        total += own if rank == me else summand[: len(own)]
    for sums in (own, out):
        sums.copy_(total)


def launch(own: Tensor, arrived: Tensor, me: int, out: Tensor) -> None:
    """``sum_share`` by the kernel, which Triton's interpreter runs on CPUs. ``own`` is not empty."""
    from fcsd.kernels.all_reduce.programs import share_kernel  # Triton is imported only where its kernels run

    kernel: Any = share_kernel
    grid = (min(_BLOCKS, -(-len(own) // _TILE)),)
    kernel[grid](own, arrived, out, len(own), arrived.stride(0), me, RANKS=len(arrived), TILE=_TILE)
