"""Moments in host memory, chunks of which are copied to the GPU for their update and back.

The copies to the GPU run on one stream, those back on another one, and the updates on the stream of the caller. A chunk
is copied into one of ``SLOTS`` pairs of buffers. While one chunk is updated, the next one is on its way to the GPU and
the one before on its way back. The host waits for none of this. Without a GPU every copy is finished
when its call returns, and nothing overlaps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SLOTS = 3  # pairs of buffers: one on the way there, one that is updated, one on the way back


class HostMoments:
    """The buffers and streams that carry chunks of moments between the host and one GPU.

    Args:
        chunk: the most elements of a chunk.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._slots: list[list[Tensor]] = []
        self._free: list[torch.cuda.Event] = []  # of each pair of buffers: its last chunk is back on the host
        self._home: dict[int, torch.cuda.Event] = {}  # the same of each chunk, by its address in host memory
        self._used = 0
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the GPU, to the host

    def fetch(self, stored: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies a chunk's moments to the device. The current stream waits for the copies.

        Args:
            stored: the moments in host memory, each with the same number of elements.

        Returns: buffers that the caller updates and hands to ``put_back`` before it fetches the next chunk.
        """
        if not self._slots:
            self._allocate(stored, device)
        number = self._used % len(self._slots)
        near = [buffer[: home.numel()] for buffer, home in zip(self._slots[number], stored, strict=True)]
        if self._streams is None:
            _copy(near, stored)
            return near
        there, _ = self._streams
        with torch.cuda.stream(there):
            there.wait_event(self._free[number])
            if (home := self._home.get(stored[0].data_ptr())) is not None:
                there.wait_event(home)
            _copy(near, stored)
        torch.cuda.current_stream().wait_stream(there)
        return near

    def put_back(self, near: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
        """Copies the updated moments of a chunk back to the host. They have arrived after a call of ``wait``."""
        if self._streams is None:
            _copy(stored, near)
            return
        _, back = self._streams
        number = self._used % len(self._slots)
        self._used += 1
        back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(back):
            _copy(stored, near)
            self._free[number].record()
            self._home.setdefault(stored[0].data_ptr(), torch.cuda.Event()).record()

    def wait(self) -> None:
        """Waits until host memory holds all moments."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def _allocate(self, stored: Sequence[Tensor], device: torch.device) -> None:
        slots = range(SLOTS if device.type == "cuda" else 1)
        self._slots = [[torch.empty(self._chunk, dtype=home.dtype, device=device) for home in stored] for _ in slots]
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._free = [torch.cuda.Event() for _ in slots]
            # Kernels of the current stream may still use the memory that the buffers have been given.
            self._streams[0].wait_stream(torch.cuda.current_stream())


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
