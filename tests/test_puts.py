"""Rows copied into the peers' memory are the rows that torch's all-to-all brings, whatever arrives late."""

import random
import tempfile

import pytest
import torch
import torch.distributed as dist
from file_window import FileWindow
from ranks import in_group

from fcsd.parallel.puts import Puts
from fcsd.parallel.transport import all_to_all, route


def _matrix(world, kind, seed):
    numbers = random.Random(seed)
    match kind:
        case "uneven":
            return [[numbers.randrange(7) for _ in range(world)] for _ in range(world)]
        case "all to the last":
            return [[0] * (world - 1) + [5] for _ in range(world)]
        case "nothing":
            return [[0] * world for _ in range(world)]
        case _:
            return [[40] * world for _ in range(world)]  # more than the buffers hold


KINDS = ["uneven", "all to the last", "uneven", "nothing", "overflow", "uneven", "overflow", "uneven"]


def _problems(rank, folder):
    """Exchanges of every kind, in turn, beside torch's, and which of them went by torch."""
    world = dist.get_world_size()
    random.seed(rank)
    puts = Puts(lambda group, capacity: FileWindow(group, capacity, folder), slack=4)
    problems, by_torch = [], []
    for seed, kind in enumerate(KINDS * 3):
        matrix = _matrix(world, kind, seed)
        way = route(matrix, rank)
        rows = torch.randn(sum(way.sends), 3, generator=torch.Generator().manual_seed(100 * rank + seed)).bfloat16()
        sent = rows.clone()
        received, work = puts(rows, way, dist.group.WORLD)
        if isinstance(work, dist.Work):
            by_torch.append(kind)
        work.wait()
        expected, work = all_to_all(sent, way, dist.group.WORLD)
        work.wait()
        if not torch.equal(received, expected):
            problems.append(f"rank {rank}: {kind} {seed}")
    return problems, by_torch


@pytest.mark.parametrize("world", [2, 4])
def test_copies_bring_what_all_to_all_brings(world):
    with tempfile.TemporaryDirectory() as folder:
        found = in_group(world, _problems, folder)
    assert [problem for problems, _ in found for problem in problems] == []
    # What does not fit goes by torch, on all ranks; the next exchange finds buffers for it, and goes by copies.
    assert [by_torch for _, by_torch in found] == [["uneven", "overflow"]] * world


def test_a_route_and_its_reverse():
    matrix = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    there = route(matrix, 1)
    assert (there.sends, there.receives, there.places, there.most) == ([4, 5, 6], [2, 5, 8], [1, 2, 3], 18)
    back = route([list(column) for column in zip(*matrix, strict=True)], 1)
    assert (back.sends, back.receives, back.places, back.most) == (there.receives, there.sends, [1, 4, 7], 24)
