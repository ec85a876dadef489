"""Reductions over symmetric memory in a CUDA graph give the reference's bits in every replay; who is chosen when."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from studies.formats.simulated_all_reduce import simulate_all_reduce
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import backends, symmetric, window
from fcsd.parallel.all_reduce.reduce import reduce
from fcsd.parallel.all_reduce.symmetric import shape_of

REPLAYS = 200
# One row and 64 rows of a decoding step, a message of several turns, and one that shares divide unevenly.
SIZES = [(1, 8192), (64, 8192), (250, 8192), (3, 128)]
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
    inputs = [torch.randn(*size, device=world.device, dtype=torch.bfloat16) for size in SIZES]
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


def test_small_messages_take_one_shot_and_large_ones_two() -> None:
    sizes = [torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (1, 128, 512)]
    assert [shape_of(x, 2).one_shot for x in sizes] == [True, True, True]
    assert [shape_of(x, 4).one_shot for x in sizes] == [True, False, False]
    assert [shape_of(x, 2).blocks for x in sizes] == [16, 32, 64]


def test_auto_takes_what_was_measured_as_the_fastest_and_nccl_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(size: int, dtype: torch.dtype = torch.bfloat16, ranks: int = 2, window: Any = "window") -> bool:
        monkeypatch.setattr(symmetric, "dist", SimpleNamespace(get_world_size=lambda _: ranks))
        monkeypatch.setattr(symmetric, "try_window", lambda _: window)
        with FakeTensorMode():
            return symmetric.pays(torch.empty(size, dtype=dtype, device="cuda"), None)

    assert [chosen(size) for size in (8192, 2**21, 2**21 + 1)] == [True, True, False]
    # A dtype that the kernels do not sum, GPUs that were not measured, and GPUs that cannot access each other's memory.
    assert {chosen(8192, torch.float64), chosen(8192, ranks=4), chosen(8192, window=None)} == {False}


def test_messages_above_4_mib_are_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(window, "try_window", lambda group: "window")
    monkeypatch.setattr(symmetric, "all_reduce", lambda x, group: called.append("symmetric"))
    monkeypatch.setattr(dist, "all_reduce", lambda x, group, async_op: called.append("nccl"))
    start = backends.backend_of("symmetric", "engine")[0].open
    assert start is not None
    for number in (2**21, 2**21 + 1):  # bf16 values: 4 MiB, and one more
        start(None, None)(torch.empty(number, dtype=torch.bfloat16))
    assert called == ["symmetric", "nccl"]
