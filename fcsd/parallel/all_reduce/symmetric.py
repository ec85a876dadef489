"""The backends ``symmetric`` and ``auto``: sums in one kernel each, in memory of GPUs that can access each other's.

The kernels are those of ``host``. In one shot a rank writes into the memory of every other rank, and waits in its own.
In blocks it writes into its own, and the others read it. NVLink multicast is never used. The ranks also share a page of
the host's memory, by which a rank that was lost ends the others, as in ``host``.

All sums of a group share this memory, so they run one after the other on one stream. Its high priority lets their
blocks start before those of the computation that covers them.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.host.compiled import Gpu
from fcsd.kernels.host.layout import CONTROL, MOST_RANKS
from fcsd.parallel.all_reduce.host_memory import open_memory
from fcsd.parallel.all_reduce.one_kernel import OneKernelSums, Places
from fcsd.parallel.transports.copies import PeerBuffers
from fcsd.parallel.transports.symmetric_memory import open_buffers
from fcsd.parallel.transports.transport import OnStream

# Bytes of a rank's values above which NCCL sums, by the number of ranks: measured on two H200s with nothing else on the
# GPUs (benchmarks/results/all_reduce.md), as the next ones. The numbers for more ranks are estimates.
_LARGEST = {2: 2**22, 3: 2**18, 4: 2**18}
_LARGEST_OF_MORE = 2**17
_ONE_SHOT = 2**20  # the most bytes in one shot
_PLACE = 4 * _ONE_SHOT  # two slots, in which values take twice their bytes
_GRID, _THREADS = 64, 512  # of every launch; the blocks of a small sum end at once


class Window(NamedTuple):
    """The sums of a group of GPUs, the stream on which all of them run, and what keeps their memory mapped."""

    sums: OneKernelSums
    stream: torch.cuda.Stream
    peers: PeerBuffers


@cache
def try_window(group: Any) -> Window | None:
    """The window of a group; None, on all ranks, if the ranks cannot access each other's memory.

    All ranks make the first call together, and not while a CUDA graph is captured.

    Raises:
        ConfigError: see ``open_memory``, and ``compiled.Gpu``.
    """
    ranks = dist.get_world_size(group)
    if not 2 <= ranks <= MOST_RANKS or "nccl" not in dist.get_backend(group):
        return None
    peers = open_buffers(group, total_bytes(ranks))
    if peers is None:
        return None
    own = peers.buffers[peers.rank].zero_()
    memory, gpu = open_memory(group, None), Gpu(ranks)
    places = places_of(peers.rank, [buffer.data_ptr() for buffer in peers.buffers])
    sums = OneKernelSums(memory, gpu, gpu.mapped(memory.address, CONTROL), places)
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[own.device.index])  # no rank writes before all have zeroed their memory
    return Window(sums, torch.cuda.Stream(priority=-1), peers)


def total_bytes(ranks: int) -> int:
    """The memory of one rank: its places for one shot, slots for blocks, and their flags."""
    return ranks * _PLACE + 4 * largest(ranks) + 2 * 64 * _GRID


def places_of(rank: int, buffers: Sequence[int]) -> dict[str, Places]:
    """The places of ``rank`` in buffers of ``total_bytes`` that begin at these addresses, which are multiples of 16."""
    of = [buffers[rank] + peer * _PLACE for peer in range(len(buffers))]
    to = [buffer + rank * _PLACE for buffer in (*buffers[rank + 1 :], *buffers[:rank])]
    blocks = [buffer + len(buffers) * _PLACE for buffer in buffers]
    return {
        "one_shot": Places(of, to, _ONE_SHOT, _GRID, _THREADS),
        "in_blocks": Places(blocks, [blocks[rank]], largest(len(buffers)), _GRID, _THREADS),
    }


def largest(ranks: int) -> int:
    """The most bytes of a rank's values that the kernels sum among ``ranks`` ranks."""
    return _LARGEST.get(ranks, _LARGEST_OF_MORE)


def starter(group: Any, otherwise: Callable[[Tensor], Any]) -> Callable[[Tensor], Any] | None:
    """What starts to replace a tensor by its sum, on a stream of its own; None if the ranks cannot sum so.

    A tensor that is too large or not supported goes to ``otherwise``. For the first call see ``try_window``.
    """
    if (window := try_window(group)) is None:
        return None
    sums, stream = window.sums, window.stream

    def start(x: Tensor) -> Any:
        if x.nbytes > largest(sums.size) or not x.is_cuda or not sums.supports(x):
            return otherwise(x)
        values = x.detach()
        return OnStream(stream, values, lambda: sums.all_reduce(values, values))

    return start
