"""Memory of the host that the ranks of a group share, and the thread that ends a process whose peer is lost.

The memory is an anonymous file of rank 0 (``memfd_create``), which the others open through /proc. It has no name that
another user could open, needs no room in /dev/shm, and is gone with the last process, however it ends.
"""

import contextlib
import ctypes
import mmap
import os
import select
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fcsd.errors import ConfigError, PeerLostError
from fcsd.foreign_errors import reason_of
from fcsd.kernels.host.layout import CONTROL, LAYOUT, LOST, MOST_RANKS, STOPPED, total_bytes

LIMIT = 300.0  # seconds that a rank waits for another one; a rank that has ended is noticed at once
_LOOK = 0.2  # seconds between two looks of the thread
_MBIND, _PREFERRED = 237, 1  # the system call on x86-64, and its mode


class HostMemory:
    """The shared memory as one rank sees it. All ranks make it together; see ``open_memory``.

    Attributes:
        rank, size: of this process in its group.
        address: where it begins in this process.
        limit: nanoseconds that a kernel waits.
    """

    def __init__(self, rank: int, pids: list[int], file: int, limit: float = LIMIT) -> None:
        self.rank, self.size, self.pids, self.limit = rank, len(pids), pids, int(limit * 1e9)
        self._map = mmap.mmap(file, total_bytes(self.size))
        self._view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_peers, name="fcsd host sums", daemon=True)
        self._peers = {peer: _handle(pid) for peer, pid in enumerate(pids) if peer != rank}
        self._watch.start()

    def region(self, rank: int, offset: int = 0) -> int:
        """Where the region of a rank begins, from the beginning of the memory."""
        return CONTROL + rank * LAYOUT.region + offset

    def word(self, offset: int) -> int:
        """A word of the control page."""
        return struct.unpack_from("<I", self._map, offset)[0]

    def set_word(self, offset: int, value: int) -> None:
        """Write a word of the control page."""
        struct.pack_into("<I", self._map, offset, value)

    def require_peers(self) -> None:
        """Check that no rank is known to be lost.

        Raises:
            PeerLostError: one is.
        """
        if lost := self.word(LOST):
            raise PeerLostError(self.reason(lost - 1))

    def reason(self, lost: int) -> str:
        """One line that names the rank that was lost."""
        ended = "has ended" if self._ended(lost) else f"did not answer for {self.limit / 1e9:.0f} s"
        return f"rank {lost} (process {self.pids[lost]}) {ended} while the ranks sum in memory that they share"

    def close(self) -> None:
        """Look after the other ranks no longer. The memory itself goes with the process."""
        self._closed.set()

    def _ended(self, peer: int) -> bool:
        if (handle := self._peers.get(peer)) is None:
            return False
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def _watch_peers(self) -> None:
        """Note a peer that has ended, however it did; end this process once a kernel of it waits for a lost rank."""
        while not self._closed.wait(_LOOK):
            for peer in self._peers:
                if not self.word(LOST) and self._ended(peer):
                    self.set_word(LOST, peer + 1)
            if self.word(STOPPED + 4 * self.rank):
                print(f"error: {self.reason(self.word(LOST) - 1)}", file=sys.stderr, flush=True)
                os._exit(PeerLostError.exit_code)


def open_memory(group: Any, device: int | None, limit: float = LIMIT) -> HostMemory:
    """Share memory between the ranks of a group; all of them call it together.

    Args:
        group: of 2 to 8 processes of one host.
        device: the CUDA device near which this rank's pages lie; None without one.

    Raises:
        ConfigError: on all ranks, if one of them cannot: the group has another size, several hosts, or a container
            hides the processes from each other.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not 2 <= size <= MOST_RANKS:
        raise ConfigError(f"sums through the host are for 2 to {MOST_RANKS} GPUs of one host, not {size}")
    file, problem = -1, None
    if rank == 0:
        file = os.memfd_create("fcsd-sums")
        os.ftruncate(file, total_bytes(size))
    told: list[Any] = [None] * size
    dist.all_gather_object(told, (_host(), os.getpid(), file), group=group)
    memory = None
    try:
        if len({host for host, _, _ in told}) > 1:
            raise ConfigError("sums through the host are for GPUs of one host, and these are on several")
        if rank:
            file = os.open(f"/proc/{told[0][1]}/fd/{told[0][2]}", os.O_RDWR)
        memory = HostMemory(rank, [pid for _, pid, _ in told], file, limit)
        if device is not None:
            _near(memory, device)
    except (OSError, ConfigError) as error:
        problem = reason_of(error)
    problems: list[Any] = [None] * size
    dist.all_gather_object(problems, problem, group=group)
    if file >= 0:
        os.close(file)
    if found := next(filter(None, problems), None):
        if memory is not None:
            memory.close()
        raise ConfigError(f"the ranks cannot share memory of the host: {found}", "Use NCCL, or one container for all.")
    assert memory is not None
    return memory


def _host() -> str:
    """What processes have in common that can share memory: the running kernel of the machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def _handle(pid: int) -> int:
    """A file that becomes readable when the process ends."""
    return os.pidfd_open(pid)


def _near(memory: HostMemory, device: int) -> None:
    """Ask for pages of this rank's region on the memory node of its GPU; where that is not possible, any will do."""
    from fcsd.kernels.host.compiled import bus_id

    with contextlib.suppress(OSError, ValueError):
        node = int(Path(f"/sys/bus/pci/devices/{bus_id(device)}/numa_node").read_text())
        if node >= 0 and os.uname().machine == "x86_64":
            begin = memory.address + memory.region(memory.rank)
            mask = ctypes.c_ulong(1 << node)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.syscall(
                ctypes.c_long(_MBIND),
                ctypes.c_void_p(begin),
                ctypes.c_ulong(LAYOUT.region),
                ctypes.c_int(_PREFERRED),
                ctypes.byref(mask),
                ctypes.c_ulong(64),
                ctypes.c_uint(0),
            )
