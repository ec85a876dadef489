"""Reductions over symmetric memory in a CUDA graph give the reference's bits in every replay; who is chosen when.

The kernels run on CPUs in ``tests/kernels/host/test_host_sums.py``.
"""

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import exit_codes, on_ranks
from studies.formats.simulated_all_reduce import simulate_all_reduce
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fcsd.errors import ConfigError, PeerLostError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import backends, symmetric
from fcsd.parallel.all_reduce.one_kernel import OneKernelSums
from fcsd.parallel.all_reduce.reduce import reduce

REPLAYS = 200
QUANTISED = "quantised:int8"


def _expected(x: Tensor, backend: str = "symmetric") -> Tensor:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    if backend == QUANTISED:
        return simulate_all_reduce(torch.stack(every), Format.parse(backend.removeprefix("quantised:")))
    total = torch.zeros_like(x, dtype=torch.float32)
    for one in every:
        total += one
    return total.to(x.dtype)


def _sums(inputs: list[Tensor], backend: str = "symmetric") -> list[Tensor]:
    """Two reductions in flight at a time, of every size."""
    found = []
    for one, two in ((0, 1), (2, 3)):
        started = [reduce(inputs[number].clone(), dist.group.WORLD, backend) for number in (one, two)]
        found += [each.wait() for each in started]
    return found


def _different() -> list[Any]:
    """The replays, or calls without a graph, whose sums differ from the reference."""
    from fcsd.launch.world import join_world

    world = join_world()
    most = symmetric.largest(world.size) // (2 * 8192)
    # One row and some rows of a decoding step, the largest message, and a small one.
    sizes = [(1, 8192), (most // 4, 8192), (most, 8192), (3, 128)]
    inputs = [torch.randn(*size, device=world.device, dtype=torch.bfloat16) for size in sizes]
    found: list[Any] = []
    with torch.no_grad():
        _sums(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _sums(inputs)
        for replay in range(REPLAYS):
            for x in inputs:
                x.normal_()
            expected = [_expected(x) for x in inputs]
            graph.replay()
            sums = {"graph": captured}
            if replay % 3 == 0:  # an odd number of calls between two replays
                sums["eager"] = _sums(inputs)
                reduce(inputs[0].clone(), dist.group.WORLD, "symmetric").wait()
            for how, each in sums.items():
                same = [torch.equal(a, b) for a, b in zip(each, expected, strict=True)]
                if not all(same):
                    found.append((how, replay, same))
        quantised = zip(_sums(inputs, QUANTISED), [_expected(x, QUANTISED) for x in inputs], strict=True)
        if not all(torch.equal(a, b) for a, b in quantised):
            found.append(QUANTISED)
    return found


@pytest.mark.multi_gpu
def test_every_replay_gives_the_bits_of_the_reference() -> None:
    ranks = min(4, torch.cuda.device_count())
    assert on_ranks(ranks, _different) == [[]] * ranks


@pytest.mark.multi_gpu
def test_gpus_sum_as_the_references() -> None:
    # The command compares every way to reduce with its reference before it times any.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "benchmarks.comm.all_reduce"]
    sizes = ["--mib", "0.0625", "4", "--formats", "int8", "int5", "int3:g32:sr"]
    subprocess.run([*command, *sizes, "--repeats", "1"], check=True, timeout=300, cwd=Path(__file__).parents[3])


def _dies() -> None:
    """Rank 1 ends while rank 0 waits for it in a sum."""
    from fcsd.launch.world import join_world

    world = join_world()
    x = torch.ones(4096, device=world.device, dtype=torch.bfloat16)
    reduce(x, dist.group.WORLD, "symmetric").wait()
    torch.cuda.synchronize()
    if world.rank == 1:
        time.sleep(1)  # rank 0 waits by then
        os.kill(os.getpid(), 9)
    reduce(x, dist.group.WORLD, "symmetric").wait()
    try:
        torch.cuda.synchronize()
    finally:
        time.sleep(30)  # the thread of the memory ends this process


@pytest.mark.multi_gpu
def test_a_rank_that_has_ended_ends_the_others_with_its_exit_code() -> None:
    codes, told = exit_codes(2, _dies)
    assert codes[0] == PeerLostError.exit_code and "error: rank 1 (process " in told and "has ended" in told


@pytest.mark.parametrize("ranks", range(2, 9))
def test_places_do_not_overlap(ranks: int) -> None:
    """What each kernel uses at every place, from the addresses that every rank has; buffers are far from each other."""
    buffers = [2**30 * (rank + 1) + 4096 * rank * rank for rank in range(ranks)]
    written: set[tuple[int, int]] = set()
    for rank in range(ranks):
        for name, places in symmetric.places_of(rank, buffers).items():
            flags = 2 * 64 * places.grid if name == "in_blocks" else 0
            spans = {(place, place + 4 * places.most + flags) for place in places.to}
            assert not spans & written, "each place has one writer"
            written |= spans
            read = [symmetric.places_of(peer, buffers)[name].of[rank] for peer in range(ranks) if peer != rank]
            assert set(read) == set(places.to)
    for (begin, end), (after, _) in pairwise(sorted(written)):
        assert begin % 64 == 0 and end <= after
    for begin, end in written:
        assert any(buffer <= begin and end <= buffer + symmetric.total_bytes(ranks) for buffer in buffers)


def chosen(name: str, size: int, patch: pytest.MonkeyPatch, ranks: int = 2, peers: bool = True, **how: Any) -> str:
    """Who sums so many values on GPUs that have access to each other's memory, or have not."""
    sums = SimpleNamespace(size=ranks, supports=OneKernelSums.supports)
    patch.setattr(symmetric, "try_window", lambda group: SimpleNamespace(sums=sums, stream=None) if peers else None)
    patch.setattr(symmetric, "OnStream", lambda stream, x, run: "symmetric")
    patch.setattr(dist, "all_reduce", lambda x, group, async_op: "nccl")
    patch.setattr(dist, "get_world_size", lambda group: ranks)
    open_backend = backends.backend_of(name, "engine")[0].open
    assert open_backend is not None
    with FakeTensorMode():
        x = torch.empty(size, **{"dtype": torch.bfloat16, "device": "cuda", **how})
    patch.setattr(x, "detach", lambda: x)
    patch.setattr(x, "data_ptr", lambda: 512)
    return open_backend(None, None)(x)  # type: ignore[return-value]


def test_auto_takes_what_was_measured_as_the_fastest_and_nccl_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [chosen("auto", size, monkeypatch) for size in (8192, 2**21, 2**21 + 8)]
    assert found == ["symmetric", "symmetric", "nccl"]
    # A tensor of the host, GPUs that were not measured, and GPUs that cannot access each other's memory.
    for how in ({"device": "cpu"}, {"ranks": 4}, {"peers": False}):
        assert chosen("auto", 8192, monkeypatch, **how) == "nccl"


@pytest.mark.parametrize(("ranks", "most"), [(2, 2**22), (4, 2**18), (8, 2**17)])
def test_messages_above_what_pays_are_left_to_nccl(ranks: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [chosen("symmetric", size, monkeypatch, ranks) for size in (most // 2, most // 2 + 8)]  # bf16 values
    assert found == ["symmetric", "nccl"]


def test_what_the_kernels_do_not_sum_is_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, dtype in ((12, torch.bfloat16), (64, torch.float64), (0, torch.bfloat16)):
        assert chosen("symmetric", size, monkeypatch, dtype=dtype) == "nccl"
    with pytest.raises(ConfigError, match="needs 2 to 8 GPUs of one host"):
        chosen("symmetric", 8192, monkeypatch, peers=False)
