"""Sums in one kernel each, in memory that the GPUs of a host share: the host's (``host``) or their own (``symmetric``).

The sum is made in fp32 in the order of ranks and rounded once, so every rank has the same bits, in either memory.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcsd.kernels.host.compiled import KINDS
from fcsd.parallel.all_reduce.host_memory import HostMemory


class Places(NamedTuple):
    """The memory of one kernel, as addresses on this rank's GPU; see ``kernels.host.layout``."""

    of: list[int]  # by rank, where it writes for this one
    to: list[int]  # where this rank writes: one place that all read, or a place for each of the others
    most: int  # bytes of values
    grid: int  # blocks of every launch, at most 64
    threads: int  # of a block


class OneKernelSums:
    """Sums of one group of processes; all of them make it together, and not while a CUDA graph is captured.

    All sums of a rank follow each other: a sum on another stream than the one before waits for that stream.

    Args:
        memory: what the ranks share of the host: at least its control page.
        device: where the values are: a ``compiled.Gpu``, or what tests put in its place on CPUs.
        control: the address of the control page on the GPU.
        places: of the kernels, by their names.
    """

    def __init__(self, memory: HostMemory, device: Any, control: int, places: Mapping[str, Places]) -> None:
        self.memory, self.device = memory, device
        self.rank, self.size = memory.rank, memory.size
        self._control, self._places = control, places
        # The numbers of calls, one for each block of a kernel.
        self._calls = {name: device.counters(one.grid) for name, one in places.items()}
        self._addresses = {
            name: self._calls[name].new_tensor([*one.of, *one.to, *[0] * (self.size - len(one.to))], dtype=torch.int64)
            for name, one in places.items()
        }

    @staticmethod
    def supports(x: Tensor) -> bool:
        """Whether ``x`` can be summed: bf16, fp16 or fp32, contiguous, in whole lines of 16 bytes."""
        whole = x.is_contiguous() and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0 and x.nbytes > 0
        return whole and x.dtype in KINDS

    def all_reduce(self, x: Tensor, out: Tensor, method: str | None = None) -> None:
        """Write the sum of ``x`` over the ranks into ``out``, which may be ``x``, on the current stream.

        Args:
            x, out: of the same shape and dtype; see ``supports``.
            method: ``one_shot`` or ``in_blocks``; None chooses by the bytes.

        Raises:
            PeerLostError: a rank has ended.
        """
        self.memory.require_peers()
        self.device.follow()
        getattr(self, method or self.method(x.nbytes))(x, out)

    def method(self, size: int) -> str:
        """The method for ``size`` bytes."""
        return "one_shot" if size <= self._places["one_shot"].most else "in_blocks"

    def one_shot(self, x: Tensor, out: Tensor, part: range | None = None, gather: bool = False) -> None:
        """Each half of a line says by itself that it has arrived.

        Args:
            out: the sum; or its part, or with ``gather`` the values of all ranks, ``[ranks, ...]``.
            part: pairs of words that are summed, at least one; None for all.
        """
        assert x.nbytes <= self._places["one_shot"].most
        part = range(x.nbytes // 8) if part is None else part
        self._start("one_shot", x, out, 8, part.start, part.stop, int(gather))

    def in_blocks(self, x: Tensor, out: Tensor, gather: bool = False) -> None:
        """With a flag for each block. Two steps from three ranks on.

        With ``gather`` it is one step, and ``out`` has the values of all ranks, ``[ranks, ...]``.
        """
        assert x.nbytes <= self._places["in_blocks"].most
        shares = self.size if self.size > 2 and not gather else 1
        self._start("in_blocks", x, out, 16, int(gather), shares)

    def _start(self, name: str, x: Tensor, out: Tensor, unit: int, *how: int) -> None:
        """Start a kernel on units of so many bytes, of which a slot has 16."""
        places = self._places[name]
        self.device.start(
            *(name, x.dtype, places.grid, places.threads, None),
            *(x.data_ptr(), out.data_ptr(), x.nbytes // unit, *how),
            *(self._addresses[name].data_ptr(), places.most // unit * 16, self.rank),
            *(self._calls[name].data_ptr(), self._control, self.memory.limit),
        )
