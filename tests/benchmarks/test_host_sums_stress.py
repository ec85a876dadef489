"""The program that makes a million random sums: on CPUs it compares them as on GPUs, and a wrong value is found."""

import random
from pathlib import Path

import cpu_device
import pytest
import ranks
import torch
from benchmarks.comm.host_sums_stress import Batch, drawn

from fcsd.kernels.host import compiled

pytestmark = pytest.mark.lab


def batches(rank: int, built: dict[int, Path]) -> list[tuple[int, int]]:
    """By dtype, the wrong values of two rounds, and those that are found after a bit of two sums was changed."""
    sums, found = cpu_device.sums(built), []
    for dtype in compiled.KINDS:
        batch = Batch(sums, dtype, drawn(random.Random(0), True)[:40], "cpu")
        batch.run()
        batch.run()
        right = int(batch.wrong)
        assert batch.coded
        for place in (0, -1):  # in codes, and exact
            batch.out.view(torch.int16)[place] ^= 1
        batch.compare()
        found.append((right, int(batch.wrong)))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_random_sums_are_compared_to_the_last_bit(world: int) -> None:
    assert ranks.in_group(world, batches, cpu_device.libraries(world)) == [[(0, 2)] * 3] * world
