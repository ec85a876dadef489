"""Sums in memory that ranks share, run between processes on CPUs: every rank has the bits of the sum in rank order.

The memory is the host's, or a buffer of each rank as the GPUs have them that can access each other's memory.
"""

import ctypes
import os
import random
import time
from pathlib import Path
from typing import Any

import cpu_device
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.errors import ConfigError, PeerLostError
from fcsd.kernels.bit_split import Format
from fcsd.kernels.host.layout import LAYOUT, LOST, STOPPED, total_bytes
from fcsd.parallel.all_reduce import host, host_memory, quantised

WAYS = ("one_shot", "in_blocks", "exchange")
EVERY_WAY = [*(("host", way) for way in WAYS), ("peers", "one_shot"), ("peers", "in_blocks")]  # memory and way
SIZES = (8, 256, 4096, 24, 32768, 512, 40, 8)  # values, multiples of eight; they change from call to call


def drawn(rank: int, call: int, size: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(1000 * call + rank))
    return torch.where(x > 2, x * 50, x).to(dtype)


def literal(call: int, size: int, dtype: torch.dtype, world: int) -> Tensor:
    """The sum in fp32 in the order of ranks, rounded once."""
    total = torch.zeros(size)
    for rank in range(world):
        total += drawn(rank, call, size, dtype).float()
    return total.to(dtype)


def sums_in(folder: Path | None, built: dict[int, Path], **options: Any) -> Any:
    """Sums in buffers of the ranks, in a folder of their own, or in memory of the host."""
    return cpu_device.peer_sums(built, folder, **options) if folder else cpu_device.sums(built, **options)


def differing(
    rank: int, world: int, built: dict[int, Path], folder: Path | None, slow: bool = False, first: int = 0
) -> list[str]:
    """What a rank finds wrong, over methods, dtypes and sizes."""
    source = random.Random(rank)
    delay = (lambda: time.sleep(source.choice((0, 0, 0.002)))) if slow else (lambda: None)
    made = sums_in(folder, built, delay=delay)
    made.device.set_counters(first)
    if first:  # what the calls before would have left
        places = made._places["one_shot"]
        for place in places.of:
            ctypes.memset(place, 0xFB, 4 * places.most)
        made.memory.set_word(made.memory.region(rank, LAYOUT.done), first & 0xFFFFFFFF)
    dist.barrier()
    wrong, call = [], 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in SIZES:
            for way in WAYS[:2] if folder else WAYS:
                call += 1
                x = drawn(rank, call, size, dtype)
                out = x if call % 2 else torch.empty_like(x)
                made.all_reduce(x, out, way)
                if not torch.equal(out, literal(call, size, dtype, world)):
                    wrong.append(f"{way} {dtype} {size}")
    return wrong


@pytest.fixture(params=["host", "peers"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """See ``sums_in``."""
    return tmp_path if request.param == "peers" else None


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_has_the_literal_sum(world: int, folder: Path | None) -> None:
    assert ranks.in_group(world, differing, world, cpu_device.libraries(world), folder) == [[]] * world


def test_ranks_that_are_slow_at_any_place_change_nothing(folder: Path | None) -> None:
    assert ranks.in_group(2, differing, 2, cpu_device.libraries(2), folder, True) == [[], []]


def set_aside(rank: int, world: int, built: dict[int, Path], folder: Path | None, way: str) -> list[bool]:
    """One rank looks so seldom that the others are in the next call when it does."""
    made = sums_in(folder, built, limit=10.0)
    made.memory.close()
    made.device.set_aside(3000 if rank == world - 1 else 0)
    found = []
    for call, size in enumerate((64, 128, 8, 64, 64, 8, 128)):
        x = drawn(rank, call, size, torch.float32)
        made.all_reduce(x, x, way)
        found.append(torch.equal(x, literal(call, size, torch.float32, world)))
    return found


@pytest.mark.parametrize(("memory", "way"), EVERY_WAY)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_was_set_aside_finds_the_others_one_call_further(
    world: int, memory: str, way: str, tmp_path: Path
) -> None:
    folder = tmp_path if memory == "peers" else None
    assert ranks.in_group(world, set_aside, world, cpu_device.libraries(world), folder, way) == [[True] * 7] * world


def test_numbers_of_calls_wrap_around(folder: Path | None) -> None:
    assert ranks.in_group(2, differing, 2, cpu_device.libraries(2), folder, False, -5) == [[], []]


def in_pieces(rank: int, built: dict[int, Path], world: int) -> bool:
    """A tensor of several pieces, and of more than one round of the exchange."""
    made = cpu_device.sums(built)
    size = (host.EXCHANGE + (5 << 20)) // 4
    x = drawn(rank, 1, size, torch.float32)
    made.exchange(x, x)
    return torch.equal(x, literal(1, size, torch.float32, world))


def test_large_tensors_travel_in_pieces_and_rounds() -> None:
    assert ranks.in_group(2, in_pieces, cpu_device.libraries(2), 2) == [True, True]


def gathers(rank: int, built: dict[int, Path], world: int) -> list[bool]:
    made = cpu_device.sums(built)
    parts = [torch.arange(37 * 3).view(37, 3) + 1000 * peer for peer in range(world)]
    same = [torch.equal(made.gathered(parts[rank]), torch.stack(parts))]
    for way in WAYS:
        for size in (1, 300, 7, 6000):  # lines, that is pairs of these values
            bits = [torch.randint(-(1 << 62), 1 << 62, (size, 2)) for _ in range(world)]
            dist.broadcast_object_list(bits)
            same.append(torch.equal(made.gathered(bits[rank], way), torch.stack(bits)))
    return same


@pytest.mark.parametrize("world", [2, 3])
def test_what_every_rank_has_is_gathered_bit_by_bit(world: int) -> None:
    assert ranks.in_group(world, gathers, cpu_device.libraries(world), world) == [[True] * 13] * world


SHARES = ([2, 2, 2], [1, 5, 3], [0, 4, 1], [700, 3, 40], [1, 1, 1])  # rows; they change from call to call


def scatters(rank: int, built: dict[int, Path], world: int, aside: int = 0) -> list[str]:
    made = cpu_device.sums(built)
    made.device.set_aside(aside if rank == world - 1 else 0)
    wrong, call = [], 0
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in (shares[:world] for shares in SHARES):
            for way in WAYS:
                call += 1
                found = made.scattered(drawn(rank, call, 16 * sum(sizes), dtype).view(-1, 2, 8), sizes, way)
                right = literal(call, 16 * sum(sizes), dtype, world).view(-1, 2, 8).split(sizes)[rank]
                if not torch.equal(found, right):
                    wrong.append(f"{way} {dtype} {sizes}")
    return wrong


@pytest.mark.parametrize(("world", "aside"), [(2, 0), (3, 0), (3, 300)])
def test_every_rank_has_its_rows_of_the_literal_sum(world: int, aside: int) -> None:
    assert ranks.in_group(world, scatters, cpu_device.libraries(world), world, aside) == [[]] * world


def in_format(rank: int, built: dict[int, Path], world: int, name: str, way: str, aside: int = 0) -> list[str]:
    """What a rank finds wrong beside the same sums over gloo; the last rank may be set aside."""
    made, format = cpu_device.sums(built), Format.parse(name)
    made.device.set_aside(aside if rank == world - 1 else 0)
    calls = made._calls["in_codes"]
    calls.fill_(-3)  # so that the numbers of its calls wrap around
    given = []
    for call, shape in enumerate(((6, 256), (1, 256), (5, 128), (40, 256))):
        for dtype in (torch.bfloat16, torch.float32):
            x = drawn(rank, call, shape[0] * shape[1], dtype).view(shape)
            x[0, :4] = torch.tensor([1e-39, -0.0, 0.0, -1e-39])
            if call == 1 and rank == 0:
                x[0, 130] = float("nan")
            if call == 3:
                x[rank, 7], x[5 - rank, 200], x[7] = float("inf"), 3e38, -2.5
                x[9], x[10, 5], x[11] = 1e-39 * rank, 3e38, x[11] * (-1) ** rank
                x[12:, :128] = (1.0, 2.0**30, -(2.0**30))[rank % 3]  # the order of the ranks decides about the sum
            expected = x.clone()
            quantised.all_reduce(expected, format, dist.group.WORLD).wait()
            given.append((x, x if call % 2 else torch.empty_like(x), expected))
    for x, out, _ in given:  # nothing else keeps the ranks together
        made.all_reduce(x, out, way, format)
    right = [torch.equal(out.nan_to_num(7e30), expected.nan_to_num(7e30)) for _, out, expected in given]
    wrong = [f"{tuple(x.shape)} {x.dtype}" for (x, *_), same in zip(given, right, strict=True) if not same]
    if way == "in_blocks" and calls.tolist()[:3] != [5] * 3:
        wrong.append("another way")
    return wrong


@pytest.mark.parametrize(
    ("world", "name", "way"),
    [
        *((world, "int8", "in_blocks") for world in (2, 3, 4, 8)),
        *((2, "int8", "exchange"), (3, "int4", "exchange"), (2, "int6:sr", "exchange")),
    ],
)
def test_a_format_means_the_same_as_over_nccl(world: int, name: str, way: str) -> None:
    assert ranks.in_group(world, in_format, cpu_device.libraries(world), world, name, way) == [[]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_codes_are_right_if_a_rank_is_set_aside(world: int) -> None:
    found = ranks.in_group(world, in_format, cpu_device.libraries(world), world, "int8", "in_blocks", 300)
    assert found == [[]] * world


def full(rank: int, built: dict[int, Path]) -> list[bool]:
    """The largest tensor that is sent in codes, twice, so that both slots are full."""
    made, format = cpu_device.sums(built), Format.parse("int8")
    rows = host.CODES * 32 // 33 // 128
    right = []
    for call in range(2):
        x = drawn(rank, call, 128 * rows, torch.bfloat16).view(rows, 128)
        expected = x.clone()
        quantised.all_reduce(expected, format, dist.group.WORLD).wait()
        made.all_reduce(x, x, "in_blocks", format)
        right.append(torch.equal(x, expected))
    return [*right, made.codes(x.new_empty(rows + 1, 128), format)]


def test_codes_fill_their_slots() -> None:
    assert ranks.in_group(3, full, cpu_device.libraries(3)) == [[True, True, False]] * 3


def waits(rank: int, built: dict[int, Path], folder: Path | None, way: str) -> Any:
    """Rank 1 never calls; what another one then says, after how many seconds."""
    made = sums_in(folder, built, limit=0.5)
    made.memory.close()  # or the thread would end this process
    begun = time.monotonic()
    told: Any = None
    if rank != 1:
        x, asked = torch.ones(32, 128), way.split(":")
        how = (asked[0], *map(Format.parse, asked[1:]))
        with pytest.raises(cpu_device.StoppedError):
            made.all_reduce(x, x, *how)
        with pytest.raises(PeerLostError, match=r"rank 1 \(process \d+\) did not answer for 0 s") as raised:
            made.all_reduce(x, x, *how)
        told = str(raised.value), time.monotonic() - begun < 30, made.memory.word(STOPPED + 4 * rank)
    dist.barrier()
    return told


@pytest.mark.parametrize(("world", "memory", "way"), [*((2, *one) for one in EVERY_WAY), (3, "host", "in_blocks:int8")])
def test_a_rank_that_does_not_come_ends_the_sum_by_name(world: int, memory: str, way: str, tmp_path: Path) -> None:
    folder = tmp_path if memory == "peers" else None
    first, nothing, *others = ranks.in_group(world, waits, cpu_device.libraries(world), folder, way)
    assert nothing is None
    for _, soon, stopped in (first, *others):
        assert soon and stopped == 1


def dies(built: dict[int, Path], folder: Path | None, killed: bool) -> None:
    """Rank 1 ends, by a signal or of itself; rank 0 is in a sum."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    made = sums_in(folder, built)
    if rank == 1:
        if killed:
            os.kill(os.getpid(), 9)
        return
    x = torch.ones(64)
    try:
        made.all_reduce(x, x, "one_shot")
    except cpu_device.StoppedError:
        time.sleep(30)  # a process whose GPU has stopped; the thread of the memory ends it


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_has_ended_ends_the_others_with_its_exit_code(killed: bool, folder: Path | None) -> None:
    begun = time.monotonic()
    codes, told = ranks.exit_codes(2, dies, cpu_device.libraries(2), folder, killed)
    assert codes[0] == PeerLostError.exit_code and "error: rank 1 (process " in told and "has ended" in told
    assert time.monotonic() - begun < 25


def goes_on(rank: int, built: dict[int, Path]) -> int:
    """Rank 1 ends after its last sum; rank 0 makes no more, and is left alone."""
    made = cpu_device.sums(built)
    x = torch.ones(64)
    made.all_reduce(x, x)
    if rank == 0:
        while not made.memory.word(LOST):
            time.sleep(0.05)
        time.sleep(0.5)
    return int(x[0])


def test_a_rank_that_sums_no_more_outlives_the_others() -> None:
    assert ranks.in_group(2, goes_on, cpu_device.libraries(2)) == [2, 2]


def leaves_nothing(rank: int, built: dict[int, Path]) -> tuple[list[str], int]:
    made = cpu_device.sums(built)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm" in line and "fcsd" in line], len(made.memory._map)


def test_the_memory_has_no_name() -> None:
    assert ranks.in_group(2, leaves_nothing, cpu_device.libraries(2)) == [([], total_bytes(2))] * 2


def unshared(rank: int) -> str:
    host_memory._host = lambda: f"host {rank}"  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ConfigError) as raised:
        host_memory.open_memory(dist.group.WORLD, None)
    return str(raised.value)


def test_several_hosts_are_refused_on_all_ranks() -> None:
    first, second = ranks.in_group(2, unshared)
    assert first == second and "on several" in first


def test_the_parts_of_a_region_do_not_overlap() -> None:
    ends = [
        (LAYOUT.one_shot, 2 * 2 * host.ONE_SHOT),
        (LAYOUT.blocks, 4 * host.BLOCKS + 2 * 64 * host.LAUNCH["in_blocks"][0]),
        (LAYOUT.codes, 4 * host.CODES + 2 * 64 * host.LAUNCH["in_codes"][0]),
        (LAYOUT.piece_flags, 64 * host.PIECES),
        (LAYOUT.done, 64),
        (LAYOUT.exchange, host.EXCHANGE),
    ]
    for (begin, size), (after, _) in zip(ends, [*ends[1:], (LAYOUT.region, 0)], strict=True):
        assert begin % 64 == 0 and begin + size <= after
