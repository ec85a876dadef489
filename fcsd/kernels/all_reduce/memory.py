"""The memory that the kernels of all ranks share, and when a part of it may be used again.

Every rank has the same memory. It consists of places. A place belongs to a stage, a block of the kernel, a slot and a
rank, and has a flag and room for ``slot_bytes`` of data:

    stage 0   what rank ``of`` adds to the values that this rank sums
    stage 1   the sums of rank ``of``

Block b of one rank communicates with block b of the other ranks only. It works in turns, and counts them over all
calls; turn t uses slot ``t % SLOTS``. A rank writes the data of a turn into the place of another rank, and then the
number of the turn into its flag. The other rank waits until the flag has that number.

No place is overwritten before it was read. Within a call, a rank writes turn t + 1 while it awaits turn t:

- One stage: it has then awaited turn t - 1, which the others wrote after they had read turn t - 3. Four slots suffice.
- Two stages: it has then awaited the sums of turn t - 2, so the others have read turn t - 2. Their sums of turn t - 3
  were read before they wrote turn t - 1.

A call begins with the next turn after the last call, and all ranks make the same calls, so this also holds between
calls. The counters are on the device, so a captured CUDA graph can be replayed any number of times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fcsd.errors import ConfigError

BLOCKS = 64  # the most blocks of a kernel
LARGE_BLOCKS = 4096  # the most blocks of the quantised kernel for large messages
SLOTS = 4
MOST_RANKS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the values that are not quantised
_ROUND = 64 * 1024  # bytes that a rank receives in one stage of a turn of one block
_STAGES = 2


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


class Rooms(NamedTuple):
    """Memory for large messages: each rank has a room with two halves, one for values and one for sums.

    In ``pull_kernel`` a rank writes into its own room, and reads those of the others. In ``large_kernel`` it writes its
    records into the rooms of the others, and reads its own. In both, a call ends when the rank has awaited the sums of
    all blocks of all ranks, which were written after the values were read. In the next call, sums are written when the
    values of all ranks were awaited, which they sent after they had read the sums of the call before.

    Attributes:
        bases: the addresses of the rooms of all ranks in this process, int64 ``[ranks]``, on the device.
        size: the bytes of a half, a multiple of 16.
        flags: the addresses of the flags behind the rooms, int64 ``[ranks]``, on the device.
        turns: how many calls each block of ``large_kernel`` has made, int32 ``[LARGE_BLOCKS]``, on the device.
    """

    bases: Tensor
    size: int
    flags: Tensor
    turns: Tensor

    @property
    def layout(self) -> Places:
        """Where the flags lie: there is one for each stage, block and rank."""
        return Places(len(self.bases), slot=0, data=0, blocks=LARGE_BLOCKS, slots=1)


class Shape(NamedTuple):
    """How a message is divided. It changes no result, but must be the same on all ranks.

    Attributes:
        one_shot: whether every rank sums all values, instead of its share.
        blocks: the most blocks, each of which occupies one SM; at most ``BLOCKS``.
        record: how many values a record of the quantised kernel has, a power of two from 256 on; None chooses.
    """

    one_shot: bool
    blocks: int = 32
    record: int | None = None


def memory_of(rank: int, addresses: Sequence[int], device: torch.device) -> Memory:
    """The shared memory of ranks whose memory begins at ``addresses`` and was set to zero.

    Every address is a multiple of 16, and the memory has ``total_bytes`` bytes.
    """
    bases = torch.tensor(addresses, dtype=torch.int64, device=device)
    return Memory(rank, len(addresses), bases, torch.zeros(BLOCKS, dtype=torch.int32, device=device))


def rooms_of(addresses: Sequence[int], size: int, device: torch.device) -> Rooms:
    """The rooms of ranks that begin at ``addresses``, with halves of ``size`` bytes.

    Every address is a multiple of 16. A room has ``room_bytes`` bytes, which were set to zero.
    """
    bases = torch.tensor(addresses, dtype=torch.int64, device=device)
    return Rooms(bases, size, bases + 2 * size, torch.zeros(LARGE_BLOCKS, dtype=torch.int32, device=device))


def room_bytes(ranks: int, size: int) -> int:
    """The size of a room with halves of ``size`` bytes, and of its flags."""
    return 2 * size + 4 * _STAGES * LARGE_BLOCKS * ranks


def require_dtype(x: Tensor) -> None:
    """Refuse values that cannot be summed in fp32.

    Raises:
        ConfigError: the dtype is not one of ``DTYPES``.
    """
    if x.dtype not in DTYPES:
        raise ConfigError(f"an all-reduce over symmetric memory sums bf16, fp16 and fp32, not {x.dtype}")


def slot_bytes(ranks: int) -> int:
    """The size of the data of one place among ``ranks`` ranks, a power of two."""
    return _ROUND >> (ranks - 1).bit_length()


def data_offset(ranks: int) -> int:
    """Where the data begin, in bytes; the flags lie before them, four bytes each."""
    return 4 * _STAGES * BLOCKS * SLOTS * ranks


def total_bytes(ranks: int) -> int:
    """The size of the memory of one rank."""
    return data_offset(ranks) + _STAGES * BLOCKS * SLOTS * ranks * slot_bytes(ranks)
