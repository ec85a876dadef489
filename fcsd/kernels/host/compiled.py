"""Builds the kernels of ``sums.cu`` by NVRTC, which comes with torch for CUDA, and starts them on a stream.

Starting goes through the driver's own entry points, because a step of a server that is not in a CUDA graph waits for
the host.
"""

import ctypes
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.host.layout import GROUPS

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_MOST_GRAPHS = 256  # each takes some tens of kilobytes
_POINTER, _INT, _WORD = ctypes.c_uint64, ctypes.c_int, ctypes.c_uint32
ARGUMENTS = {
    "one_shot": (_POINTER, _POINTER, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER),
    "in_blocks": (_POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER),
    "in_codes": (_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER),
    "announce": (_POINTER, _POINTER),
    "await_all": (_POINTER, _POINTER, _INT, _POINTER, _WORD, _POINTER, _POINTER),
    "finish": (_POINTER, _POINTER, _INT, _POINTER),
    "add_parts": (_POINTER, _POINTER, _POINTER, _INT, _INT),
}


def source() -> str:
    """The text of the kernels."""
    return Path(__file__).with_name("sums.cu").read_text(encoding="utf-8")


class Gpu:
    """The current CUDA device as the sums use it: kernels, copy engines, and streams beside the current one.

    Args:
        ranks: for which the kernels are built.

    Raises:
        ConfigError: NVRTC is missing, or cannot compile for this GPU.
    """

    def __init__(self, ranks: int) -> None:
        self._driver, self._functions = _driver(), {}
        self._modules, self._arguments = [], {}
        for name, kinds in ARGUMENTS.items():
            values = [kind() for kind in kinds]
            addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            self._arguments[name] = values, addresses
        for dtype, kind in KINDS.items():
            module = ctypes.c_void_p()
            image = _compiled(ranks, kind, torch.cuda.get_device_capability())
            _check(self._driver.cuModuleLoadData(ctypes.byref(module), image), "loading a kernel")
            self._modules.append(module)
            for name in ARGUMENTS:
                function = ctypes.c_void_p()
                found = self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
                _check(found, f"finding the kernel {name}")
                self._functions[name, dtype] = function
        device = torch.cuda.current_device()
        self.index = device
        self._last: torch.cuda.Stream | None = None
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        # Two in each direction: while a copy engine works for one, the other one waits for its flag.
        self._ups, self._downs = ([torch.cuda.Stream(device, priority=-1) for _ in range(2)] for _ in range(2))
        self._recording = torch.cuda.Stream(device, priority=-1)
        self._graphs: dict[Hashable, ctypes.c_void_p] = {}

    def follow(self) -> None:
        """Let the current stream wait for the one of the call before, if it is another one.

        While a graph is captured, whoever captures it joins its streams.
        """
        current = torch.cuda.current_stream()
        if self._last is not None and self._last != current and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self._last)
        self._last = current

    def counters(self, count: int) -> Tensor:
        """Numbers of calls, int32 ``[count]``, all 0."""
        return torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", self.index))

    def bytes(self, count: int) -> Tensor:
        """Memory of the GPU, uint8 ``[count]``."""
        return torch.empty(count, dtype=torch.uint8, device=torch.device("cuda", self.index))

    def mapped(self, address: int, size: int) -> int:
        """Map memory of the host; its address on the GPU."""
        return register(address, size)

    def blocks(self, lines: int) -> int:
        """Blocks of 256 threads for a kernel that passes over so many lines once."""
        return min(2 * self._multiprocessors, -(-lines // 256))

    def start(
        self, name: str, dtype: torch.dtype, grid: int, threads: int, stream: int | None, *arguments: int
    ) -> None:
        """Start a kernel on a stream (None: the current one) with its arguments in their order."""
        values, addresses = self._arguments[name]
        for value, given in zip(values, arguments, strict=True):
            value.value = given
        where = torch.cuda.current_stream().cuda_stream if stream is None else stream
        started = self._driver.cuLaunchKernel(
            self._functions[name, dtype], grid, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(where), addresses, None
        )
        _check(started, f"starting the kernel {name}")

    def copy(self, to: int, of: int, size: int, stream: int, up: bool) -> None:
        """Let a copy engine copy ``size`` bytes between the GPU and the host, ``up`` to the host, on a stream."""
        do = self._driver.cuMemcpyDtoHAsync_v2 if up else self._driver.cuMemcpyHtoDAsync_v2
        _check(do(_POINTER(to), _POINTER(of), ctypes.c_size_t(size), ctypes.c_void_p(stream)), "copying by the host")

    def copy_here(self, to: int, of: int, size: int) -> None:
        """Copy ``size`` bytes within the GPU, on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        done = self._driver.cuMemcpyDtoDAsync_v2(_POINTER(to), _POINTER(of), ctypes.c_size_t(size), stream)
        _check(done, "copying within the GPU")

    def replay(self, key: Hashable, do: Callable[[], None]) -> None:
        """Do what is the same whenever ``key`` is, on the current stream.

        The first time it is recorded as a CUDA graph, because the host takes longer to start its parts than they take.
        """
        if torch.cuda.is_current_stream_capturing():
            do()
            return
        if key not in self._graphs:
            if len(self._graphs) == _MOST_GRAPHS:
                torch.cuda.synchronize()
                for graph in self._graphs.values():
                    _check(self._driver.cuGraphExecDestroy(graph), "forgetting a graph")
                self._graphs.clear()
            self._graphs[key] = self._recorded(do)
        where = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(self._driver.cuGraphLaunch(self._graphs[key], where), "starting a graph")

    def _recorded(self, do: Callable[[], None]) -> ctypes.c_void_p:
        stream, graph, made = ctypes.c_void_p(self._recording.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
        this_thread = 1  # what others call meanwhile does not matter
        with torch.cuda.stream(self._recording):
            _check(self._driver.cuStreamBeginCapture_v2(stream, this_thread), "recording a graph")
            try:
                do()
            finally:
                ended = self._driver.cuStreamEndCapture(stream, ctypes.byref(graph))
            _check(ended, "recording a graph")
        _check(
            self._driver.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_uint64(0)), "making a graph"
        )
        _check(self._driver.cuGraphDestroy(graph), "making a graph")
        return made

    def fork(self) -> tuple[list[int], list[int]]:
        """The streams of what goes up and of what comes down, after all that is on the current stream."""
        current = torch.cuda.current_stream()
        for stream in (*self._ups, *self._downs):
            stream.wait_stream(current)
        return [stream.cuda_stream for stream in self._ups], [stream.cuda_stream for stream in self._downs]

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        current = torch.cuda.current_stream()
        for stream in (*self._ups, *self._downs):
            current.wait_stream(stream)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def register(address: int, size: int) -> int:
    """Map memory of the host for all GPUs of this process, and return its address on them.

    Raises:
        ConfigError: the driver refuses it.
    """
    portable_and_mapped, device = 3, _POINTER()
    done = _driver().cuMemHostRegister_v2(_POINTER(address), ctypes.c_size_t(size), portable_and_mapped)
    _check(done, "mapping memory of the host for the GPU")
    _check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(device), _POINTER(address), 0), "finding mapped memory")
    return int(device.value)


def bus_id(device: int) -> str:
    """The PCI address of a CUDA device, as /sys writes it."""
    found, handle = ctypes.create_string_buffer(32), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "finding the GPU")
    _check(_driver().cuDeviceGetPCIBusId(found, 32, handle), "finding the GPU's address")
    return found.value.decode().lower()


@cache
def _compiled(ranks: int, kind: int, capability: tuple[int, int]) -> bytes:
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]: comes with torch for CUDA
    except ImportError as error:
        raise ConfigError(
            "sums through the host need NVRTC, and cuda.bindings is not installed",
            hint="pip install cuda-bindings",
        ) from error
    program = _answer(nvrtc.nvrtcCreateProgram(source().encode(), b"sums.cu", 0, [], []))
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(),
        *(f"-D{name}={value}".encode() for name, value in (("RANKS", ranks), ("KIND", kind), ("GROUPS", GROUPS))),
    ]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result):
        log = b" " * _answer(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"NVRTC cannot compile the sums through the host: {log.decode().splitlines()[0]}")
    image = b" " * _answer(nvrtc.nvrtcGetCUBINSize(program))
    _answer((*nvrtc.nvrtcGetCUBIN(program, image), None))
    return image


def _answer(found: tuple[Any, ...]) -> Any:
    if int(found[0]):
        raise ConfigError(f"NVRTC answers {found[0]}")
    return found[1]


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"CUDA error {result} in {what}")
