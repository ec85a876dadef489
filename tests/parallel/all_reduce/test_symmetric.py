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
    # One row and some rows of a decoding step, the largest message, which takes several turns, and a small one.
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


def test_auto_takes_what_was_measured_as_the_fastest_and_nccl_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(size: int, dtype: torch.dtype = torch.bfloat16, ranks: int = 2, window: Any = "window") -> bool:
        monkeypatch.setattr(symmetric, "dist", SimpleNamespace(get_world_size=lambda _: ranks))
        monkeypatch.setattr(symmetric, "try_window", lambda _: window)
        with FakeTensorMode():
            return symmetric.pays(torch.empty(size, dtype=dtype, device="cuda"), None)

    assert [chosen(size) for size in (8192, 2**21, 2**21 + 1)] == [True, True, False]
    # A dtype that the kernels do not sum, GPUs that were not measured, and GPUs that cannot access each other's memory.
    assert {chosen(8192, torch.float64), chosen(8192, ranks=4), chosen(8192, window=None)} == {False}


@pytest.mark.parametrize(("ranks", "most"), [(2, 2**22), (4, 2**18), (8, 2**17)])
def test_messages_above_what_pays_are_left_to_nccl(ranks: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(window, "try_window", lambda group: "window")
    monkeypatch.setattr(symmetric, "all_reduce", lambda x, group: called.append("symmetric"))
    monkeypatch.setattr(dist, "all_reduce", lambda x, group, async_op: called.append("nccl"))
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    start = backends.backend_of("symmetric", "engine")[0].open
    assert start is not None
    for number in (most // 2, most // 2 + 1):  # bf16 values
        start(None, None)(torch.empty(number, dtype=torch.bfloat16))
    assert called == ["symmetric", "nccl"]
