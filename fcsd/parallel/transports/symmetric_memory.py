"""A window on CUDA: torch's symmetric memory, with flags that streams write and await without a kernel."""

import os
import platform
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage]

from fcsd.parallel.process_settings import OverlapWarning
from fcsd.parallel.transports.copies import Window
from fcsd.parallel.transports.transport import Work

_MARK, _FLAGS = 2048, 4096  # bytes before the marks, and before the buffer; first a 32-bit number per flag and rank


def open_window(group: Any, capacity: int) -> Window | None:
    """A window for a group whose GPUs are of one host and reach each other; None for any other, on all ranks.

    What the device was given before is complete on all ranks when this returns, so an older window may go.
    """
    torch.cuda.synchronize()
    # Without peer-to-peer copies NCCL goes through the host's memory; whoever asks it to means all traffic.
    places = _everywhere((platform.node(), os.environ.get("NCCL_P2P_DISABLE", "0")), group)
    if len({host for host, _ in places}) > 1 or any(disabled != "0" for _, disabled in places):
        return None
    window, problem = None, None
    try:
        window = SymmetricWindow(group, capacity)
    except (RuntimeError, ImportError) as error:  # no peer access; or bindings that ROCm, for one, does not have
        problem = str(error)
    # No flag is set before all were cleared.
    problems = [found for found in _everywhere(problem, group) if found]
    if problems:
        warnings.warn(f"rows travel by NCCL, GPUs cannot copy them: {problems[0]}", OverlapWarning, stacklevel=2)
        return None
    return window


def _everywhere(value: Any, group: Any) -> list[Any]:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class SymmetricWindow:
    """See ``puts.Window``.

    Raises:
        RuntimeError: the GPUs of ``group`` do not reach each other.
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
        self._kept = memory, handle
        self._out, self._in = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        torch.cuda.synchronize()

    def sending(self) -> AbstractContextManager[Any]:
        return self._after_current(self._out)

    def receiving(self) -> AbstractContextManager[Any]:
        return self._after_current(self._in)

    def tell(self, peer: int, flag: int, number: int) -> None:
        # Flags 0: after a fence for the whole system.
        self._check(self._driver.cuStreamWriteValue32(_stream(), self._flag(peer, flag, self.rank), number, 0))

    def hear(self, peer: int, flag: int, number: int) -> None:
        # Flags 0: until the number there is this one or a later one.
        self._check(self._driver.cuStreamWaitValue32(_stream(), self._flag(self.rank, flag, peer), number, 0))

    def work(self) -> Work:
        if _profiler_enabled():
            # A trace shows copies, and no waits: this one, of a byte, shows when the last rows have arrived.
            with torch.cuda.stream(self._in):
                self._mark_there.copy_(self._mark)
        return _Done([self._out.record_event(), self._in.record_event()])

    def _flag(self, at: int, flag: int, of: int) -> int:
        """The address at one rank of another's flag."""
        return self._addresses[at] + 4 * (flag * self.size + of)

    def _check(self, answer: tuple[Any]) -> None:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA: {answer[0].name}")

    @staticmethod
    def _after_current(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


class _Done:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
