"""Peer buffers in torch's symmetric memory on CUDA. Streams write flags and wait for them without a kernel."""

import os
import platform
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage]

from fcsd.foreign_errors import reason_of
from fcsd.parallel.process_settings import OverlapWarning
from fcsd.parallel.transports.copies import PeerBuffers
from fcsd.parallel.transports.transport import Several, Work

# Offsets in bytes of the marks and of the buffer. The memory begins with one 32-bit number for each flag and rank.
_MARK, _FLAGS = 2048, 4096


def open_buffers(group: Any, capacity: int) -> PeerBuffers | None:
    """Make buffers of ``capacity`` bytes for a group whose GPUs are in one host and can access each other's memory.

    All ranks call it together. When it returns, all work that any rank launched before the call is complete, so buffers
    that were made earlier can be freed.

    Returns: None, on all ranks, for any other group.
    """
    torch.cuda.synchronize()
    # NCCL_P2P_DISABLE makes NCCL send rows through host memory. A user who sets it does not want peer-to-peer copies.
    hosts = _gather((platform.node(), os.environ.get("NCCL_P2P_DISABLE", "0")), group)
    if len({host for host, _ in hosts}) > 1 or any(disabled != "0" for _, disabled in hosts):
        return None
    buffers, problem = None, None
    try:
        buffers = SymmetricBuffers(group, capacity)
    except (RuntimeError, ImportError) as error:  # no peer access, or no CUDA bindings, as under ROCm
        problem = reason_of(error)
    # This collective also makes sure that no flag is set before all ranks have cleared theirs.
    problems = [found for found in _gather(problem, group) if found]
    if problems:
        message = f"rows travel by NCCL because the GPUs cannot copy into each other's memory: {problems[0]}"
        warnings.warn(message, OverlapWarning, stacklevel=2)
        return None
    return buffers


def _gather(value: Any, group: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class SymmetricBuffers:
    """The ``PeerBuffers`` of a group of GPUs.

    Raises:
        ImportError: CUDA's Python bindings are missing.
        RuntimeError: the GPUs of ``group`` cannot access each other's memory.
    """

    def __init__(self, group: Any, capacity: int) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]: comes with torch for CUDA
        from torch.distributed import _symmetric_memory as symmetric

        self._driver: Any = driver
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric.empty(_FLAGS + capacity, dtype=torch.uint8, device=device)
        memory[:_FLAGS].zero_()
        handle = symmetric.rendezvous(memory, group)
        self.rank, self.size = handle.rank, handle.world_size
        self.buffers = [handle.get_buffer(rank, (capacity,), torch.uint8, _FLAGS) for rank in range(self.size)]
        self._addresses = handle.buffer_ptrs
        marks = [handle.get_buffer(rank, (self.size,), torch.uint8, _MARK) for rank in range(self.size)]
        self._mark, self._mark_there = marks[self.rank][:1], marks[self.rank - 1][self.rank :][:1]
        self._held = memory, handle  # the buffers above are views of this memory
        self._out, self._in = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        torch.cuda.synchronize()

    def sending(self) -> AbstractContextManager[Any]:
        return self._after_current(self._out)

    def receiving(self) -> AbstractContextManager[Any]:
        return self._after_current(self._in)

    def set_flag(self, peer: int, flag: int, number: int) -> None:
        # Option 0 writes the number after a system-wide memory fence.
        self._check(self._driver.cuStreamWriteValue32(_stream(), self._address(peer, flag, self.rank), number, 0))

    def await_flag(self, peer: int, flag: int, number: int) -> None:
        # Option 0 waits until the value is ``number`` or larger.
        self._check(self._driver.cuStreamWaitValue32(_stream(), self._address(self.rank, flag, peer), number, 0))

    def work(self) -> Work:
        if _profiler_enabled():
            # A trace shows copies but no waits; this copy of one byte shows when the last rows have arrived.
            with torch.cuda.stream(self._in):
                self._mark_there.copy_(self._mark)
        return Several([self._out.record_event(), self._in.record_event()])

    def _address(self, at: int, flag: int, of: int) -> int:
        """The address, in the memory of rank ``at``, of the flag that rank ``of`` sets."""
        return self._addresses[at] + 4 * (flag * self.size + of)

    def _check(self, answer: tuple[Any]) -> None:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA: {answer[0].name}")

    @staticmethod
    def _after_current(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
