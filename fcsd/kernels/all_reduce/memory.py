"""The memory that the ranks share, and when a part of it may be used again.

Every rank has the same memory. It consists of places. A place belongs to a block of the kernel, a slot and a rank
``of``, and has a flag and room for ``slot_bytes`` of data: what that rank adds to the values that this rank sums.

Block b of one rank communicates with block b of the other ranks only. It works in turns, and counts them over all
calls; turn t uses slot ``t % SLOTS``. A rank writes the data of a turn into the place of another rank, and then the
number of the turn into its flag. The other rank waits until the flag has that number.

No place is overwritten before it was read. Within a call, a rank writes turn t + 1 while it awaits turn t. It has then
awaited turn t - 1, which the others wrote after they had read turn t - 3. Four slots suffice.

A call begins with the next turn after the last call, and all ranks make the same calls, so this also holds between
calls. The counters are on the device, so a captured CUDA graph can be replayed any number of times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCKS = 64  # the most blocks of a kernel
SLOTS = 4
MOST_RANKS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROUND = 64 * 1024  # bytes that a rank receives in a turn of one block


class Places(NamedTuple):
    """Where the places lie in the memory: what the kernels must know when they are compiled."""

    ranks: int
    slot: int  # the size of the data of a place, in bytes
    data: int  # where the data begin, in bytes
    blocks: int = BLOCKS
    slots: int = SLOTS


@dataclass(frozen=True)
class Memory:
    """The shared memory of all ranks as one of them sees it.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks, at most ``MOST_RANKS``.
        bases: the addresses of the memory of each rank in this process, int64 ``[ranks]``, on the device.
        turns: how many turns each block has made, int32 ``[BLOCKS]``, on the device.
    """

    rank: int
    size: int
    bases: Tensor
    turns: Tensor

    @property
    def slot_bytes(self) -> int:
        """The size of the data of one place."""
        return slot_bytes(self.size)

    @property
    def layout(self) -> Places:
        """Where the places lie."""
        return Places(self.size, self.slot_bytes, data_offset(self.size))


def memory_of(rank: int, addresses: Sequence[int], device: torch.device) -> Memory:
    """The shared memory of ranks whose memory begins at ``addresses`` and was set to zero.

    Every address is a multiple of 16, and the memory has ``total_bytes`` bytes.
    """
    bases = torch.tensor(addresses, dtype=torch.int64, device=device)
    return Memory(rank, len(addresses), bases, torch.zeros(BLOCKS, dtype=torch.int32, device=device))


def slot_bytes(ranks: int) -> int:
    """The size of the data of one place among ``ranks`` ranks, a power of two."""
    return _ROUND >> (ranks - 1).bit_length()


def data_offset(ranks: int) -> int:
    """Where the data begin, in bytes; the flags lie before them, four bytes each."""
    return 4 * BLOCKS * SLOTS * ranks


def total_bytes(ranks: int) -> int:
    """The size of the memory of one rank."""
    return data_offset(ranks) + BLOCKS * SLOTS * ranks * slot_bytes(ranks)
