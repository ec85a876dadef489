"""The kernel of all-reduces gives the bits of its reference on three ranks, in Triton's interpreter and on GPUs.

In the interpreter the ranks are processes that map the same files, so that the flags are really awaited.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_group
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.all_reduce import programs
from fcsd.kernels.all_reduce.memory import SLOTS, memory_of, slot_bytes, total_bytes

RANKS = 3
# The number of values, their dtype, and the most blocks. With one block the message takes six turns, so that slots are
# used again, also by the next call. Whole numbers have exact sums in bf16, which the interpreter does not round.
SUMS = [
    (16, torch.float16, 32),
    (24_000, torch.float32, 1),
    (24_008, torch.float32, 2),
    (40_000, torch.bfloat16, 2),
]


def _drawn(number: int, dtype: torch.dtype, call: int = 0) -> list[Tensor]:
    """The summands of each rank. Those of two calls differ, so that values of an earlier call are noticed."""
    every = [torch.randn(number, generator=torch.Generator().manual_seed(RANKS * call + rank)) for rank in range(RANKS)]
    return [one if dtype == torch.float32 else (one * 10).round().to(dtype) for one in every]


def _summed(every: list[Tensor]) -> Tensor:
    total = torch.zeros_like(every[0], dtype=torch.float32)
    for one in every:
        total += one
    return total.to(every[0].dtype)


def _found(rank: int, folder: str) -> dict[str, list[Any]]:
    """The cases whose results differ from their references."""
    ranks, size = range(RANKS), total_bytes(RANKS)
    files = [torch.from_file(f"{folder}/{peer}", shared=True, size=size, dtype=torch.uint8) for peer in ranks]
    memory = memory_of(rank, [file.data_ptr() for file in files], torch.device("cpu"))
    calls = count(1)

    def wrong(number: int, dtype: torch.dtype, reduce: Callable[[Tensor], Any]) -> bool:
        every = _drawn(number, dtype, next(calls))
        expected = _summed(every)
        reduce(every[rank])
        return not torch.equal(every[rank], expected)

    def summed(blocks: int) -> Callable[[Tensor], None]:
        return lambda x: programs.all_reduce(x, memory, blocks)

    sums = [case for case in SUMS + SUMS[1:3] if wrong(*case[:2], summed(case[2]))]
    return {"sums": sums, "turns": memory.turns.tolist()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the ranks are processes of the interpreter")
    folder = tmp_path_factory.mktemp("memory")
    for rank in range(RANKS):
        with (folder / str(rank)).open("wb") as file:
            file.truncate(total_bytes(RANKS))
    return in_group(RANKS, _found, str(folder))


def test_sums_are_those_in_the_order_of_ranks(found: list[dict[str, list[Any]]]) -> None:
    assert [rank["sums"] for rank in found] == [[]] * RANKS
    # Every rank has made the same turns, more than there are slots.
    assert all(rank["turns"] == found[0]["turns"] for rank in found) and found[0]["turns"][0] > 4 * SLOTS


def test_places_of_all_numbers_of_ranks_fit_and_are_aligned() -> None:
    assert [slot_bytes(ranks) for ranks in (2, 3, 4, 8)] == [32768, 16384, 16384, 8192]
    for ranks in range(2, 9):
        assert total_bytes(ranks) < 2**26 and total_bytes(ranks) % 16 == 0
        assert ranks * slot_bytes(ranks) <= 65536


def test_what_cannot_be_summed_is_refused() -> None:
    memory = memory_of(0, [0, 0], torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"not torch\.int64"):
        programs.all_reduce(torch.ones(16, dtype=torch.int64), memory)


@pytest.mark.multi_gpu
def test_gpus_sum_as_the_references() -> None:
    # The command compares every way to reduce with its reference before it times any.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "benchmarks.comm.all_reduce"]
    sizes = ["--mib", "0.0625", "4", "--formats", "int8", "int5", "int3:g32:sr"]
    subprocess.run([*command, *sizes, "--repeats", "1"], check=True, timeout=300, cwd=Path(__file__).parents[2])
