"""Sums through memory of the host by ranks that take turns on one GPU, where each is set aside all the time."""

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.bit_split import Format
from fcsd.kernels.host.layout import BLOCKS, ONE_SHOT
from fcsd.parallel.all_reduce import host, quantised

LARGEST = {"one_shot": ONE_SHOT, "in_blocks": BLOCKS}
SIZES = (16, 8 << 10, 64 << 10, 1 << 20, 3 << 20, 64 << 20)  # bytes


def joined() -> int:
    """This rank, in a group over gloo: NCCL refuses two ranks on one GPU."""
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    return dist.get_rank()


def differing() -> list[str]:
    """What a rank finds wrong: eagerly, and in a graph that is replayed."""
    rank = joined()
    sums = host.sums_of(dist.group.WORLD, limit=60.0)
    wrong = []
    for size in SIZES:
        draw = [torch.Generator().manual_seed(size + peer) for peer in range(2)]
        parts = [torch.randn(size // 2, generator=one).bfloat16() for one in draw]
        right = (parts[0].float() + parts[1].float()).bfloat16()
        x, out = parts[rank].cuda(), torch.empty_like(parts[rank], device="cuda")
        for way in ("one_shot", "in_blocks", "exchange"):
            if size > LARGEST.get(way, size):
                continue
            for _ in range(4):  # what a call leaves must not mislead the next one
                sums.all_reduce(x, out, way)
            wrong += _unless_equal(out, right, f"{way}, {size} bytes")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(4):
                    sums.all_reduce(x, out, way)
            for _ in range(2):
                out.zero_()
                graph.replay()
                wrong += _unless_equal(out, right, f"{way}, {size} bytes, replayed")
    return wrong


def _unless_equal(out: Tensor, right: Tensor, what: str) -> list[str]:
    return [] if torch.equal(out.cpu(), right) else [what]


@pytest.mark.gpu
def test_every_way_has_the_literal_sum_on_a_gpu_that_two_ranks_share() -> None:
    assert ranks.results(2, differing) == [[], []]


def exchanged() -> list[str]:
    """What a rank finds wrong of gathers and of its rows of sums, replayed in a graph."""
    rank, wrong = joined(), []
    sums = host.sums_of(dist.group.WORLD, limit=60.0)
    for size in SIZES[1:5]:
        rows = [size // 48, size // 32 - size // 48]
        draw = [torch.Generator().manual_seed(size + peer) for peer in range(2)]
        parts = [torch.randn(sum(rows), 16, generator=one).bfloat16() for one in draw]
        total = (parts[0].float() + parts[1].float()).bfloat16().split(rows)[rank]
        x = parts[rank].cuda()
        for way in ("one_shot", "in_blocks", "exchange"):
            if size > LARGEST.get(way, size):
                continue
            sums.gathered(x, way)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                every, own = sums.gathered(x, way), sums.scattered(x, rows, way)
            for _ in range(2):
                graph.replay()
                wrong += _unless_equal(every, torch.stack(parts), f"{way}, {size} bytes, gathered")
                wrong += _unless_equal(own, total, f"{way}, {size} bytes, scattered")
    return wrong


@pytest.mark.gpu
def test_what_ranks_gather_and_their_rows_of_sums_are_right_on_a_gpu() -> None:
    assert ranks.results(2, exchanged) == [[], []]


def in_format() -> list[str]:
    rank = joined()
    sums, wrong = host.sums_of(dist.group.WORLD, limit=60.0), []
    for name in ("int8", "int4"):
        for rows in (1, 700):
            x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rank)).bfloat16()
            right, format = x.clone(), Format.parse(name)
            quantised.all_reduce(right, format, dist.group.WORLD).wait()
            x, out = x.cuda(), torch.empty_like(x, device="cuda")
            for way in ["exchange"] + ["in_blocks"] * sums.codes(x, format):
                for _ in range(3):  # the second time an exchange is recorded, and then replayed
                    out.zero_()
                    sums.all_reduce(x, out, way, format)
                wrong += _unless_equal(out, right, f"{name}, {rows} rows, {way}")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
def test_a_format_means_the_same_as_over_gloo_on_cpus(world: int) -> None:
    assert ranks.results(world, in_format) == [[]] * world
