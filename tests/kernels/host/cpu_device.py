"""Puts CPUs in the place of the GPUs of the sums: the kernels of ``sums.cu`` as threads, two queues as streams."""

import ctypes
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcsd.kernels.host import compiled
from fcsd.parallel.all_reduce.host import HostSums
from fcsd.parallel.all_reduce.host_memory import open_memory
from fcsd.parallel.all_reduce.one_kernel import OneKernelSums
from fcsd.parallel.all_reduce.symmetric import places_of, total_bytes

_FOLDER = Path(__file__).parent


class StoppedError(RuntimeError):
    """A kernel has stopped, as it would end the process on a GPU."""


@cache
def library(ranks: int, kind: int) -> Path:
    """The kernels as a library for CPUs; g++ is required."""
    folder = Path(tempfile.mkdtemp(prefix="fcsd-host-sums-"))
    parts = (_FOLDER / "on_cpu.h").read_text(), compiled.source(), (_FOLDER / "runs.h").read_text()
    (folder / "sums.cpp").write_text("\n".join(parts))
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w", f"-DRANKS={ranks}", f"-DKIND={kind}"]
    subprocess.run(["g++", *options, str(folder / "sums.cpp"), "-o", str(folder / "sums.so")], check=True)
    return folder / "sums.so"


class Cpu:
    """See ``compiled.Gpu``. ``delay`` is called before every kernel and copy, to make a rank slow."""

    def __init__(self, libraries: dict[int, Path], delay: Callable[[], None] = lambda: None) -> None:
        self._libraries = {dtype: ctypes.CDLL(str(libraries[kind])) for dtype, kind in compiled.KINDS.items()}
        self._delay = delay
        self._queues = [_Stream() for _ in range(4)]
        self._kept: list[torch.Tensor] = []
        self._recorded: dict[Any, Callable[[], None]] = {}
        self.files: list[torch.Tensor] = []  # what has to stay mapped

    def follow(self) -> None:
        return None

    def counters(self, count: int) -> torch.Tensor:
        self._kept.append(torch.zeros(count, dtype=torch.int32))
        return self._kept[-1]

    def set_counters(self, number: int) -> None:
        """Go on as if so many calls had been made."""
        for counter in self._kept:
            counter.fill_(number)

    def set_aside(self, microseconds: int) -> None:
        """Let every look at what another rank has written wait, as on a GPU that another process has for the moment."""
        for one in self._libraries.values():
            one.set_aside(microseconds)

    def bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def replay(self, key: Any, do: Callable[[], None]) -> None:
        """Does what the first call of ``key`` did, with its arguments, as a recorded graph would."""
        self._recorded.setdefault(key, do)()

    def mapped(self, address: int, size: int) -> int:
        return address

    def blocks(self, lines: int) -> int:
        return 1

    def start(self, name: str, dtype: Any, grid: int, threads: int, stream: int | None, *arguments: int) -> None:
        given = [kind(value) for kind, value in zip(compiled.ARGUMENTS[name], arguments, strict=True)]

        def do() -> None:
            self._delay()
            if getattr(self._libraries[dtype], f"run_{name}")(min(grid, 3), *given):
                raise StoppedError(name)

        do() if stream is None else self._queues[stream].put(do)

    def copy(self, to: int, of: int, size: int, stream: int, up: bool) -> None:
        def do() -> None:
            self._delay()
            ctypes.memmove(to, of, size)

        self._queues[stream].put(do)

    def copy_here(self, to: int, of: int, size: int) -> None:
        ctypes.memmove(to, of, size)

    def fork(self) -> tuple[list[int], list[int]]:
        return [0, 1], [2, 3]

    def join(self) -> None:
        for one in self._queues:
            one.drain()


class _Stream:
    """Work that a thread does in its order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._failed: list[BaseException] = []
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, do: Callable[[], None]) -> None:
        self._queue.put(do)

    def drain(self) -> None:
        self._queue.join()
        if self._failed:
            raise self._failed[0]

    def _work(self) -> None:
        while True:
            do = self._queue.get()
            try:
                if not self._failed:
                    do()
            except BaseException as error:
                self._failed.append(error)
            finally:
                self._queue.task_done()


def libraries(ranks: int) -> dict[int, Path]:
    """The libraries for all dtypes, built once by the test's own process."""
    return {kind: library(ranks, kind) for kind in compiled.KINDS.values()}


def sums(built: dict[int, Path], limit: float = 60.0, delay: Callable[[], None] = lambda: None) -> HostSums:
    """The sums of this rank's world in memory of the host."""
    made = HostSums(open_memory(dist.group.WORLD, None, limit), Cpu(built, delay))
    dist.barrier()
    return made


def peer_sums(
    built: dict[int, Path], folder: Path, limit: float = 60.0, delay: Callable[[], None] = lambda: None
) -> OneKernelSums:
    """The same in buffers of the ranks, which are files of an empty folder; no two have the same distance."""
    memory, cpu = open_memory(dist.group.WORLD, None, limit), Cpu(built, delay)
    size, first = total_bytes(memory.size), [4096 * (peer * peer + 1) for peer in range(memory.size)]
    cpu.files = [
        torch.from_file(str(folder / str(peer)), shared=True, size=begin + size, dtype=torch.uint8)
        for peer, begin in enumerate(first)
    ]
    buffers = [file.data_ptr() + begin for file, begin in zip(cpu.files, first, strict=True)]
    made = OneKernelSums(memory, cpu, memory.address, places_of(memory.rank, buffers))
    dist.barrier()
    return made
