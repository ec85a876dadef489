"""Copies of a snapshot's tensors in host memory. They are written to disk while the run changes the originals.

Copies of tensors on a GPU lie in page-locked ("pinned") memory, into which a GPU copies several times as fast. PyTorch
rounds the size of each page-locked allocation up to a power of two. To allocate is slow, so the memory of the first
snapshot serves all later ones.
"""

import os
from contextlib import suppress

import torch
from torch import Tensor

from fcsd.launch.world import World
from fcsd.parity import free_memory

_SHARE = 0.8  # the share of the free host memory that the copies of all ranks of a host may take


class HostCopies:
    """Memory for the copies of one snapshot at a time."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def restart(self) -> None:
        """Begins a new snapshot. The copies of the one before must not be used any more."""
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in host memory, with its shape and dtype. Call ``wait`` before it is read.

        Snapshots have the same tensors in the same order, so the n-th copy has the memory of the n-th copy before.
        """
        if self._used == len(self._buffers):
            self._buffers.append(host_memory(tensor, tensor.dtype))
        buffer = self._buffers[self._used]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[self._used] = host_memory(tensor, tensor.dtype)
        self._used += 1
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Waits until the GPU has made all copies. The originals may change afterwards."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def size_of(tensor: Tensor) -> int:
    """The bytes of host memory that a copy of the tensor takes."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda and tensor.nbytes else tensor.nbytes


def room_for(size: int, world: World) -> bool:
    """Whether the hosts of all ranks have room for copies of ``size`` bytes on each rank. Every rank calls this."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # ranks on this host
    return all(world.everywhere(lambda: size * beside <= _SHARE * free_memory()))


def host_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory in the shape of a tensor. It is page-locked if the tensor is on a GPU.

    Where the host limits page-locked memory, it is ordinary memory, which is slower.
    """
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=dtype)
