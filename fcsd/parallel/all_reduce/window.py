"""The symmetric memory in which the GPUs of one host reduce. It is made when a group first needs it.

All reductions of a group share this memory, so they run one after the other on one stream. Its high priority lets their
blocks start before those of the computation that covers them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.all_reduce.memory import MOST_RANKS, Memory, memory_of, total_bytes
from fcsd.parallel.transports.copies import PeerBuffers
from fcsd.parallel.transports.symmetric_memory import open_buffers


class Window:
    """The memory of a group of GPUs, and the stream on which it is used.

    Attributes:
        memory: what ``kernels.all_reduce`` needs.
        stream: the stream of all reductions of the group.
    """

    def __init__(self, memory: Memory, peers: PeerBuffers) -> None:
        self.memory = memory
        self.stream = torch.cuda.Stream(priority=-1)
        self._peers = peers  # keeps the memory mapped


@cache
def try_window(group: Any) -> Window | None:
    """The window of a group; None, on all ranks, if the ranks cannot access each other's memory.

    All ranks make the first call together, and not while a CUDA graph is captured.
    """
    ranks = dist.get_world_size(group)
    if ranks > MOST_RANKS or "nccl" not in dist.get_backend(group):
        return None
    peers = open_buffers(group, total_bytes(ranks))
    if peers is None:
        return None
    own = peers.buffers[peers.rank]
    own.zero_()
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[own.device.index])  # no rank writes before all flags are zero
    memory = memory_of(peers.rank, [buffer.data_ptr() for buffer in peers.buffers], own.device)
    torch.cuda.synchronize()
    return Window(memory, peers)


class OnStream:
    """Work that was started on a stream. ``wait`` lets the current stream wait for it."""

    def __init__(self, stream: torch.cuda.Stream, tensor: Tensor, start: Callable[[], object]) -> None:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            start()
            self._done = stream.record_event()
        self._kept = tensor  # its memory may belong to another stream

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        del self._kept
