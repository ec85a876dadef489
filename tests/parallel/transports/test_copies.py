"""Copies into the memory of peers bring the rows that torch's all-to-all brings, however late anything arrives."""

import random
import subprocess
import sys
import tempfile
import time
from itertools import count

import pytest
import torch
import torch.distributed as dist
from file_buffers import FileBuffers, opener
from ranks import in_group

from fcsd.parallel.transports.copies import ARRIVED, CopiesTransport
from fcsd.parallel.transports.transport import all_to_all, splits_of


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
    """Exchanges of every kind, one after the other, that differ from torch's; and which of them torch sent."""
    random.seed(rank)
    copies = CopiesTransport(opener(folder), slack=4)
    problems, by_torch = [], []
    in_place = {}  # rows that are read in the buffer, with the rows expected: valid until the next such exchange
    for seed, kind in enumerate(KINDS * 4):
        splits = splits_of(_matrix(dist.get_world_size(), kind, seed), rank)
        rows = torch.randn(
            sum(splits.sends), 256, generator=torch.Generator().manual_seed(100 * rank + seed)
        ).bfloat16()
        keep = seed % 3 == 0
        if not keep:
            problems += [name for name, pair in in_place.items() if not torch.equal(*pair)]
            in_place.clear()
        received, work = copies(rows, splits, dist.group.WORLD, keep)
        if isinstance(work, dist.Work):
            by_torch.append((kind, keep))
        work.wait()
        expected, work = all_to_all(rows, splits, dist.group.WORLD, keep)
        work.wait()
        in_place[f"rank {rank}: {kind} {seed}"] = received, expected
    return problems, by_torch


@pytest.mark.parametrize("world", [2, 4])
def test_copies_bring_what_all_to_all_brings(world):
    with tempfile.TemporaryDirectory() as folder:
        found = in_group(world, _problems, folder)
    assert [problem for problems, _ in found for problem in problems] == []
    # Torch sends what does not fit, on all ranks; the next exchange makes buffers that hold it, and is sent by copies.
    by_torch = [("uneven", True), ("all to the last", False), ("overflow", False), ("overflow", True)]
    assert [kinds for _, kinds in found] == [by_torch] * world


class LateReader(FileBuffers):
    """Rank 1 sees at once that rows have arrived, and reads them long after that."""

    def await_flag(self, peer, flag, number):
        super().await_flag(peer, flag, number)
        if self.rank == 1 and flag == ARRIVED:
            time.sleep(0.03)


def _kept(rank, folder):
    """The first value of each row that the caller keeps, of exchanges one after the other."""
    numbers = count()
    copies = CopiesTransport(lambda group, capacity: LateReader(group, capacity, f"{folder}/{next(numbers)}"))
    splits, found = splits_of([[1, 2], [2, 1]], rank), []
    for number in range(6):
        received, work = copies(torch.full((3, 256), 10.0 * number + rank), splits, dist.group.WORLD, True)
        work.wait()
        found.append(received[:, 0].tolist())
    return found


def test_no_rank_writes_over_rows_that_another_has_not_read(tmp_path):
    expected = [[[10.0 * number + peer for peer in peers] for number in range(6)] for peers in ((0, 1, 1), (0, 0, 1))]
    assert in_group(2, _kept, tmp_path) == expected


def test_splits_and_their_reverse():
    matrix = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    there = splits_of(matrix, 1)
    assert (there.sends, there.receives, there.offsets, there.most) == ([4, 5, 6], [2, 5, 8], [1, 2, 3], 18)
    back = splits_of([list(column) for column in zip(*matrix, strict=True)], 1)
    assert (back.sends, back.receives, back.offsets, back.most) == (there.receives, there.sends, [1, 4, 7], 24)


@pytest.mark.multi_gpu
def test_gpus_bring_what_nccl_brings():
    # The command compares a hundred exchanges before it times any.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "benchmarks.comm.transports"]
    subprocess.run(command, check=True, timeout=300)
