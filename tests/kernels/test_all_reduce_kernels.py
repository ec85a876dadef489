"""The kernels of all-reduces give the bits of their references on three ranks, in Triton's interpreter and on GPUs.

In the interpreter the ranks are processes that map the same files, so that the flags are really awaited.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from file_buffers import opener
from ranks import in_group
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.all_reduce import launch
from fcsd.kernels.all_reduce.memory import SLOTS, Shape, memory_of, slot_bytes, total_bytes
from fcsd.kernels.bit_split import Format
from fcsd.parallel.tensor.copies import Copies, capacity
from fcsd.parallel.tensor.simulated import simulate_all_reduce

RANKS = 3
# The number of values, their dtype, and how they are divided. With one block the message takes six turns, so that slots
# are used again, also by the next call. Whole numbers in bf16 have exact sums: the interpreter truncates casts.
SUMS = [
    (16, torch.float32, Shape(one_shot=True)),
    (12_000, torch.float32, Shape(one_shot=True, blocks=1)),
    (36_000, torch.float32, Shape(one_shot=False, blocks=1)),
    (36_008, torch.float32, Shape(one_shot=False, blocks=2)),
    (40_000, torch.bfloat16, Shape(one_shot=True, blocks=2)),
    (4100, torch.bfloat16, Shape(one_shot=False)),
]
# The format, rows and width, dtype and shape. The first two messages have several records in a place.
QUANTISED = [
    ("int8", (9, 128), torch.float32, Shape(one_shot=True, blocks=1, record=256)),
    ("int5", (11, 128), torch.float32, Shape(one_shot=False, blocks=1, record=256)),
    ("int3:g32:sr", (5, 64), torch.float32, Shape(one_shot=False, blocks=2, record=256)),
]


def _drawn(number: int, dtype: torch.dtype) -> list[Tensor]:
    """The summands of each rank."""
    every = [torch.randn(number, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    return [(one * 10).round().to(dtype) if dtype == torch.bfloat16 else one for one in every]


def _summed(every: list[Tensor]) -> Tensor:
    total = torch.zeros_like(every[0], dtype=torch.float32)
    for one in every:
        total += one
    return total.to(every[0].dtype)


def _found(rank: int, folder: str) -> dict[str, list[Any]]:
    """The cases whose results differ from their references."""
    files = [
        torch.from_file(f"{folder}/{peer}", shared=True, size=total_bytes(RANKS), dtype=torch.uint8)
        for peer in range(RANKS)
    ]
    memory = memory_of(rank, [file.data_ptr() for file in files], torch.device("cpu"))
    sums, quantised, copied = [], [], []
    for number, dtype, shape in SUMS + SUMS[1:3]:
        every = _drawn(number, dtype)
        launch.all_reduce(every[rank], memory, shape)
        if not torch.equal(every[rank], _summed(_drawn(number, dtype))):
            sums.append((number, dtype, shape))
    vars(launch)["_SMALLEST"] = 64  # of this process alone: large messages would take too long here
    for text, size, dtype, shape in QUANTISED:
        every = torch.stack([one.view(size) for one in _drawn(size[0] * size[1], dtype)])
        every[0, 0, 5] = 300.0
        every[1, -1, 3] = float("nan")
        x = every[rank].clone()
        launch.all_reduce_quantised(x, memory, shape, Format.parse(text))
        expected = simulate_all_reduce(every, Format.parse(text))
        if not expected.isnan().any() or not torch.equal(x.view(torch.int32), expected.view(torch.int32)):
            quantised.append((text, size, shape))
    copies = Copies(opener(f"{folder}/copies")(None, capacity(4096, RANKS)), piece=4096)
    for number, dtype, _ in SUMS:
        every = _drawn(number, dtype)
        copies(every[rank]).wait()
        if not torch.equal(every[rank], _summed(_drawn(number, dtype))):
            copied.append((number, dtype))
    return {"sums": sums, "quantised": quantised, "copies": copied, "turns": memory.turns.tolist()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the ranks are processes of the interpreter")
    folder = tmp_path_factory.mktemp("memory")
    (folder / "copies").mkdir()
    for rank in range(RANKS):
        with (folder / str(rank)).open("wb") as file:
            file.truncate(total_bytes(RANKS))
    return in_group(RANKS, _found, str(folder))


def test_sums_are_those_in_the_order_of_ranks_in_one_shot_and_in_two(found: list[dict[str, list[Any]]]) -> None:
    assert [rank["sums"] for rank in found] == [[]] * RANKS
    # Every rank has made the same turns, more than there are slots.
    assert all(rank["turns"] == found[0]["turns"] for rank in found) and found[0]["turns"][0] > 4 * SLOTS


def test_quantised_sums_are_those_of_the_reference(found: list[dict[str, list[Any]]]) -> None:
    assert [rank["quantised"] for rank in found] == [[]] * RANKS


def test_sums_by_copies_are_those_in_the_order_of_ranks(found: list[dict[str, list[Any]]]) -> None:
    assert [rank["copies"] for rank in found] == [[]] * RANKS


def test_places_of_all_numbers_of_ranks_fit_and_are_aligned() -> None:
    assert [slot_bytes(ranks) for ranks in (2, 3, 4, 8)] == [32768, 16384, 16384, 8192]
    for ranks in range(2, 9):
        assert total_bytes(ranks) < 2**26 and total_bytes(ranks) % 16 == 0
        assert ranks * slot_bytes(ranks) <= 65536


def test_what_cannot_be_summed_is_refused() -> None:
    memory = memory_of(0, [0, 0], torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"not torch\.int64"):
        launch.all_reduce(torch.ones(16, dtype=torch.int64), memory, Shape(True))
    with pytest.raises(ConfigError, match="do not divide rows of 96 values"):
        launch.all_reduce_quantised(torch.ones(2, 96), memory, Shape(True), Format.parse("int8"))


@pytest.mark.multi_gpu
def test_gpus_sum_as_the_references() -> None:
    # The command compares every way to reduce with its reference before it times any.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fcsd.bench.all_reduce"]
    sizes = ["--mib", "0.0625", "8", "--formats", "int8", "int5", "int3:g32:sr", "--blocks", "1", "32"]
    subprocess.run([*command, *sizes, "--repeats", "1"], check=True, timeout=300, cwd=Path(__file__).parents[2])
