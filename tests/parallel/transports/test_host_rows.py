"""Rows through memory of the host are those of torch's all-to-all, bit by bit, also in a run's student and teacher."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_device
import pytest
import tiny
import torch
import torch.distributed as dist
from divided import sharded
from ranks import exit_codes, in_group
from rewired import backward

from fcsd.config import Parallel
from fcsd.distill.experts import expert_parallel
from fcsd.errors import ConfigError, PeerLostError
from fcsd.models.wiring import Wiring
from fcsd.parallel.all_reduce import host as sums
from fcsd.parallel.transports import host
from fcsd.parallel.transports.host import HostTransport
from fcsd.parallel.transports.transport import all_to_all, splits_of

FARSKIP = Wiring("farskip", (0, 1, 2, 3))


class Late:
    """Work that is done when it is awaited, once. Until then nothing has arrived."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run

    def wait(self) -> None:
        if self._run is not None:
            self._run()
        self._run = None


def _matrices(world: int) -> list[list[list[int]]]:
    """How many rows each rank sends to each: few, none, all to the last, an empty pair, and many for one pair alone."""
    numbers = random.Random(world)
    few = [[[numbers.randrange(5) for _ in range(world)] for _ in range(world)] for _ in range(4)]
    one = [[2] * world for _ in range(world)]
    one[0][world - 1] = 9
    return [*few, [[0] * world] * world, [[0] * (world - 1) + [5]] * world, one, [[0] * world, *one[1:]], *few]


def _problems(rank: int, built: dict[int, Path], world: int, room: int, aside: bool = False) -> list[str]:
    """The exchanges that bring other rows than torch's; a rank shows ``room`` bytes of rows at once.

    With ``aside`` the last rank looks so seldom that the others are in the next call when it does.
    """
    sums.EXCHANGE = room  # pyright: ignore[reportPrivateImportUsage]: this process ends with the test
    shared, source = cpu_device.sums(built), random.Random(rank)
    shared.device.set_aside(1000 if aside and rank == world - 1 else 0)
    shared.device._delay = lambda: time.sleep(source.choice((0, 0, 0, 0.001)))
    transport = HostTransport(lambda group: shared, (Late, Late))
    problems = []
    for number, matrix in enumerate(_matrices(world)):
        splits = splits_of(matrix, rank)
        for dtype, width in ((torch.bfloat16, 1024), (torch.uint8, 37)):
            rows = torch.randint(0, 256, (sum(splits.sends), width * dtype.itemsize), dtype=torch.uint8).view(dtype)
            received, work = transport(rows, splits, dist.group.WORLD, number % 2 == 0)
            work.wait()
            expected, work = all_to_all(rows, splits, dist.group.WORLD, False)
            work.wait()
            if not torch.equal(received.view(torch.uint8), expected.view(torch.uint8)):
                problems.append(f"{number} {dtype}")
    return problems


@pytest.mark.parametrize(("world", "room"), [(2, sums.EXCHANGE), (2, 4096), (3, 4096), (4, 5000)])
def test_the_rows_are_those_of_torch_in_one_round_and_in_several(world: int, room: int) -> None:
    assert in_group(world, _problems, cpu_device.libraries(world), world, room) == [[]] * world


def test_a_rank_that_was_set_aside_changes_no_row() -> None:
    assert in_group(3, _problems, cpu_device.libraries(3), 3, 8192, True) == [[]] * 3


def _dies(built: dict[int, Path]) -> None:
    """Rank 1 is killed before it sends; rank 0 waits for its rows."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shared = cpu_device.sums(built)
    if rank == 1:
        os.kill(os.getpid(), 9)
    transport = HostTransport(lambda group: shared, (Late, Late))
    work = transport(torch.ones(5, 64), splits_of([[2, 3], [4, 1]], 0), dist.group.WORLD, False)[1]
    try:
        work.wait()
    except cpu_device.StoppedError:
        time.sleep(30)  # a process whose GPU has stopped; the thread of the memory ends it


def test_a_killed_rank_ends_the_others_by_name() -> None:
    codes, told = exit_codes(2, _dies, cpu_device.libraries(2))
    assert codes[0] == PeerLostError.exit_code and "error: rank 1 (process " in told and "has ended" in told


def test_the_largest_part_for_another_rank_is_known_to_all() -> None:
    matrix = [[9, 2, 3], [4, 9, 6], [7, 8, 9]]
    assert [splits_of(matrix, rank).between for rank in range(3)] == [8, 8, 8]
    assert splits_of([[5]], 0).between == 0


def _passes(model: Any, rank: int) -> list[torch.Tensor]:
    """Logits and gradients of two batches; the ranks have different numbers of tokens."""
    found = []
    for number in range(2):
        ids = tiny.tokens(seed=10 * rank + number, length=8 + 4 * rank)
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=False)
        backward(out.loss)
        found += [out.logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def _trained(rank: int, built: dict[int, Path], dedup: str) -> list[str]:
    """A student whose rows go through the host in parts, overlapped and recomputed, against gloo."""
    shared, calls = cpu_device.sums(built), []
    exchange = shared.all_to_all_uneven

    def counted(*arguments: Any) -> None:
        calls.append(arguments[-1])
        exchange(*arguments)

    shared.all_to_all_uneven = counted  # pyright: ignore[reportAttributeAccessIssue]
    sums.EXCHANGE = 2048  # pyright: ignore[reportPrivateImportUsage]: this process ends with the test
    sums.sums_of = lambda group: shared  # pyright: ignore[reportAttributeAccessIssue]
    host.streams = lambda: (Late, Late)  # pyright: ignore[reportAttributeAccessIssue]
    model, wrong = sharded("deepseek_v2"), []
    for recomputed in (False, True):
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found = {}
        for way in ("nccl", "host", "eager-sync"):
            settings: Any = {"transport": way, "overlap": "on"}
            if way == "eager-sync":
                settings = {"transport": "host", "overlap": way}
            parallel = Parallel(ep_size=2, dedup=dedup, fused=False, **settings)  # pyright: ignore[reportArgumentType]
            expert_parallel.wire_sharded(model, 2, parallel, wiring=FARSKIP)
            found[way] = _passes(model, rank)
        for way in ("host", "eager-sync"):
            same = map(torch.equal, found["nccl"], found[way])
            wrong += [] if all(same) and len(found[way]) == len(found["nccl"]) else [f"{way}, recomputed {recomputed}"]
    # Three layers with experts: dispatch and combine, forward, backward, and when they are recomputed.
    expected = 2 * 2 * (3 * 4 + 3 * 6)
    several = sum(most > sums.EXCHANGE for most in calls)
    return wrong + ([] if len(calls) == expected and several else [f"{len(calls)} exchanges, {several} of two rounds"])


@pytest.mark.parametrize("dedup", ["off", "rank"])
def test_a_student_trains_to_the_bits_of_gloo(dedup: str) -> None:
    assert in_group(2, _trained, cpu_device.libraries(2), dedup) == [[], []]


def _without_gpus(rank: int) -> str:
    with pytest.raises(ConfigError) as raised:
        expert_parallel.wire_sharded(sharded("deepseek_v2"), 2, Parallel(ep_size=2, transport="host"), wiring=FARSKIP)
    return str(raised.value)


def test_it_is_refused_before_the_first_step_without_gpus_and_where_nothing_would_travel_so() -> None:
    assert in_group(2, _without_gpus) == ["rows through the host are for GPUs"] * 2
    with pytest.raises(ValueError, match=r"transport host needs .*ep_size above 1"):
        Parallel(transport="host")
    with pytest.raises(ValueError, match=r"transport host needs .*overlap on"):
        Parallel(ep_size=2, transport="host", overlap="off")
