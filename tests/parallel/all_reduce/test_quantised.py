"""Every rank ends a quantised all-reduce with the bits of the reference, over gloo and routed in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_group
from torch import Tensor

from fcsd.bench import all_reduce
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import quantised
from fcsd.parallel.all_reduce.reduce import reduce, reduce_gradient
from fcsd.parallel.all_reduce.steps import Steps, cut, hierarchical, split, two_step
from fcsd.parallel.quantised.simulated_all_reduce import simulate_all_reduce

# (format, shape, dtype, ranks, ranks of a node or None, chunks). One row is cut into pieces, or, where it has a single
# group, padded; 15 rows in 3 chunks do not divide evenly among 4 ranks.
CASES = [
    ("int8", (2, 6, 256), torch.bfloat16, 4, None, 1),
    ("int5", (3, 5, 256), torch.bfloat16, 4, None, 3),
    ("int4", (1, 1, 256), torch.bfloat16, 4, None, 1),
    ("int6", (1, 128), torch.float32, 4, None, 2),
    ("int3:g64:sr", (7, 128), torch.bfloat16, 2, None, 1),
    ("int8", (3, 5, 256), torch.bfloat16, 4, 2, 1),
    ("int2:g32:sr", (9, 256), torch.float32, 4, 2, 3),
]


def _drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """This rank's summands; some values are much larger than the others, as activations are."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(rank))
    return torch.where(x > 2, x * 50, x).to(dtype)


def _reference(format: str, shape: tuple[int, ...], dtype: torch.dtype, ranks: range, node_size: int | None) -> Tensor:
    partials = torch.stack([_drawn(rank, shape, dtype) for rank in ranks])
    return simulate_all_reduce(partials, Format.parse(format), node_size)


def _found(rank: int) -> dict[str, Any]:
    """What one of four ranks computes. The ranks 0 and 1, and 2 and 3, are two groups of two ranks."""
    groups = {2: _pair(rank), 4: dist.group.WORLD}
    sums, sent = [], []
    for format, shape, dtype, ranks, node_size, chunks in CASES:
        topology = quantised.Topology(groups[ranks], chunks=chunks)
        if node_size is not None:
            topology = quantised.nodes_of(groups[ranks], node_size, chunks)
        x = _drawn(rank, shape, dtype)
        with _Counted(rank) as counted:
            quantised.all_reduce(x, Format.parse(format), topology).wait()
        sums.append(x)
        sent.append(counted.across)
    refused = ""
    try:
        quantised.nodes_of(groups[4], 3)
    except ConfigError as error:
        refused = str(error)
    bench = all_reduce.bench(0.0625, torch.device("cpu"), node_size=2, chunks=2, formats=("int5", "int4"), repeats=1)
    return {"sums": sums, "sent": sent, "reduce": _kinds(rank), "refused": refused, "bench": bench}


def _pair(rank: int) -> Any:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pairs[rank // 2]


def _kinds(rank: int) -> dict[str, Tensor]:
    """The kind of ``reduce``, with two all-reduces in flight at once, and the gradients of both directions."""
    group = dist.group.WORLD
    stream = _drawn(rank, (2, 3, 128), torch.float32).requires_grad_()
    first = reduce(stream * 1, group, "quantised:int5")
    second = reduce(stream * 2, group, "quantised:int8", layer=1)
    values = {"first": first.wait(), "second": second.wait()}
    values["second"].backward(_drawn(10 + rank, (2, 3, 128), torch.float32))
    assert stream.grad is not None
    values["identity"] = stream.grad / 2
    x = _drawn(7, (2, 3, 128), torch.float32).requires_grad_()
    reduce_gradient(x * 1, group, "quantised:int6").backward(_drawn(rank, (2, 3, 128), torch.float32))
    assert x.grad is not None
    values["gradient"] = x.grad
    return {name: value.detach().clone() for name, value in values.items()}


class _Counted:
    """Counts the bytes that this rank hands to torch.distributed for ranks of the other node of two."""

    def __init__(self, rank: int) -> None:
        self.across, self._node = 0, rank // 2

    def __enter__(self) -> "_Counted":
        self._real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}
        for name, real in self._real.items():
            setattr(dist, name, self._counting(real, shares=name == "all_to_all_single"))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _counting(self, real: Callable[..., Any], shares: bool) -> Callable[..., Any]:
        def counting(received: Tensor, sent: Tensor, group: Any, async_op: bool) -> Any:
            ranks = dist.get_process_group_ranks(group)
            others = sum(rank // 2 != self._node for rank in ranks)
            self.across += others * (sent.nbytes // len(ranks) if shares else sent.nbytes)
            return real(received, sent, group=group, async_op=async_op)

        return counting


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return in_group(4, _found)


def test_all_ranks_end_with_the_bits_of_the_reference(ranks: list[dict[str, Any]]) -> None:
    for number, (format, shape, dtype, size, node_size, _) in enumerate(CASES):
        for rank, found in enumerate(ranks):
            first = rank - rank % size
            expected = _reference(format, shape, dtype, range(first, first + size), node_size)
            assert torch.equal(found["sums"][number], expected), (format, rank)
            assert torch.equal(found["sums"][number], ranks[first]["sums"][number])


def test_a_quantised_sum_is_close_to_the_sum(ranks: list[dict[str, Any]]) -> None:
    partials = [_drawn(rank, *CASES[0][1:3]).float() for rank in range(4)]
    error = ranks[0]["sums"][0].float() - sum(partials)
    assert 0 < error.norm() < 0.02 * torch.stack(partials).sum(0).norm()


def test_the_kind_of_reduce_quantises_values_and_gradients(ranks: list[dict[str, Any]]) -> None:
    partials = torch.stack([_drawn(rank, (2, 3, 128), torch.float32) for rank in range(4)])
    for rank, found in enumerate(ranks):
        kinds = found["reduce"]
        assert torch.equal(kinds["first"], simulate_all_reduce(partials, Format.parse("int5")))
        assert torch.equal(kinds["second"], simulate_all_reduce(partials * 2, Format.parse("int8")))
        assert torch.equal(kinds["identity"], _drawn(10 + rank, (2, 3, 128), torch.float32))
        assert torch.equal(kinds["gradient"], simulate_all_reduce(partials, Format.parse("int6")))


def test_bytes_across_the_bridge_between_two_nodes_of_two_ranks(ranks: list[dict[str, Any]]) -> None:
    """From one node to the other: 2M in two steps among four ranks, M by nodes; M is one rank's records."""
    for number, nodes, expected in ((0, None, 2), (5, 2, 1)):
        format, shape, *_, node_size, _ = CASES[number]
        assert node_size == nodes
        rows = cut(torch.ones(shape), Format.parse(format), nodes or 4)
        volume = len(rows) * Format.parse(format).row_bytes(rows.shape[1])
        assert ranks[0]["sent"][number] + ranks[1]["sent"][number] == expected * volume


def _wrong_on_eight(rank: int) -> list[str]:
    """The cases in which eight ranks, alone and as nodes of four and of two, get other bits than the reference."""
    problems = []
    for format, shape, dtype, *_ in CASES[2:5]:
        for node_size, chunks in ((None, 1), (4, 1), (2, 3)):
            group = dist.group.WORLD
            topology = quantised.Topology(group, chunks=chunks)
            if node_size is not None:
                topology = quantised.nodes_of(group, node_size, chunks)
            x = _drawn(rank, shape, dtype)
            quantised.all_reduce(x, Format.parse(format), topology).wait()
            if not torch.equal(x, _reference(format, shape, dtype, range(8), node_size)):
                problems.append(f"{format} {shape}, nodes of {node_size}, {chunks} chunks")
    return problems


@pytest.mark.nightly
def test_eight_ranks_end_with_the_bits_of_the_reference() -> None:
    assert [problem for problems in in_group(8, _wrong_on_eight) for problem in problems] == []


def test_ranks_that_nodes_do_not_divide_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("4 ranks cannot be divided into nodes of 3" in found["refused"] for found in ranks)


def test_the_benchmark_times_every_way_and_format(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["bench"]
    ways = ["in steps", "in steps, in chunks", "by nodes", "by nodes, in chunks"]
    assert list(found) == ["nccl", *(f"quantised:{format} {way}" for format in ("int5", "int4") for way in ways)]
    assert all(0 < time.low <= time.median <= time.high for time in found.values())
    second = {"nccl": found["nccl"], list(found)[1]: None}
    table = all_reduce.to_text({"0.0625 MiB": found, "1 MiB": second}).splitlines()
    assert len(table) == 11 and table[-1] == "on the wire: int5 5.25, int4 5 bits per value"
    assert [line.split()[-1] for line in table[1:4]] == ["(1.00x)", "wrong", "-"]


def _route(every: list[Steps], node_size: int) -> tuple[list[Tensor], int]:
    """Run the steps of all ranks in one process: their sums, and the bytes from the first node to the second."""
    ranks, sums, across = range(len(every)), {}, 0
    messages = {rank: next(steps) for rank, steps in enumerate(every)}
    while messages:
        arriving = {}
        for rank, message in messages.items():
            peers = [peer for peer in ranks if _takes_part(message.scope, rank, peer, node_size)]
            records = [messages[peer].records for peer in peers]
            if message.kind == "all-to-all":
                records = [shares[peers.index(rank)] for shares in records]
            arriving[rank] = torch.stack(records)
            if rank // node_size == 1:
                across += sum(r.nbytes for r, peer in zip(records, peers, strict=True) if peer // node_size == 0)
        messages = {}
        for rank, records in arriving.items():
            try:
                messages[rank] = every[rank].send(records)
            except StopIteration as done:
                sums[rank] = done.value
    return [sums[rank] for rank in ranks], across


def _takes_part(scope: str, rank: int, peer: int, node_size: int) -> bool:
    if scope == "whole":
        return True
    return rank // node_size == peer // node_size if scope == "near" else rank % node_size == peer % node_size


def _ring(rows: list[Tensor]) -> tuple[list[Tensor], int]:
    """A ring all-reduce as NCCL's: the sums, and the bytes from the last rank of the first half to the next rank."""
    ranks = len(rows)
    parts = [list(one.clone().chunk(ranks)) for one in rows]
    across = 0
    for step in range(2 * (ranks - 1)):
        moved = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        sent = [parts[rank][part].clone() for rank, part in moved]
        across += sent[ranks // 2 - 1].nbytes
        for (rank, part), values in zip(moved, sent, strict=True):
            to = (rank + 1) % ranks
            parts[to][part] = parts[to][part] + values if step < ranks - 1 else values
    return [torch.cat(one) for one in parts], across


def test_the_volumes_of_table_5() -> None:
    """Two nodes of four ranks: 4M from one to the other in two steps, M by nodes, and 7M / 4 in a ring."""
    format = Format.parse("int5")
    partials = [_drawn(rank, (16, 256), torch.float32) for rank in range(8)]
    volume = 16 * format.row_bytes(256)
    expected = simulate_all_reduce(torch.stack(partials), format)
    sums, across = _route([two_step(rows, format, 8) for rows in partials], 4)
    assert all(torch.equal(one, expected) for one in sums) and across == 4 * volume
    expected = simulate_all_reduce(torch.stack(partials), format, node_size=4)
    sums, across = _route([hierarchical(rows, format, 4) for rows in partials], 4)
    assert all(torch.equal(one, expected) for one in sums) and across == volume
    sums, across = _ring(partials)
    assert torch.allclose(sums[3], torch.stack(partials).sum(0), atol=1e-3) and across == 7 * partials[0].nbytes // 4


def test_rows_are_cut_only_where_ranks_do_not_divide_them() -> None:
    format = Format.parse("int4")  # groups of 32
    assert cut(torch.ones(2, 4, 256), format, 4).shape == (8, 256)
    assert cut(torch.ones(1, 256), format, 4).shape == (4, 64)
    assert cut(torch.ones(6, 256), format, 4).shape == (12, 128)
    padded = cut(torch.ones(3, 32), format, 4)
    assert padded.shape == (4, 32) and padded.sum() == 3 * 32
    assert cut(torch.ones(0, 256), format, 4).shape == (0, 256)
    assert [len(part) for part in split(torch.ones(12, 32), ranks=4, chunks=2)] == [8, 4]
    assert split(torch.ones(0, 32), ranks=4, chunks=2) == []


def test_formats_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ConfigError, match='"fp8" is not a format of the wire'):
        reduce(torch.ones(2, 128), None, "quantised:fp8")
    with pytest.raises(ConfigError, match="integer scales cannot express") as refused:
        reduce_gradient(torch.ones(2, 128), None, "quantised:int3:g128:sr")
    assert refused.value.hint == "write quantised:int3:g128:sr:bf16"
    with pytest.raises(ConfigError, match="do not divide rows of 96 values"):
        cut(torch.ones(2, 96), Format.parse("int8"), 2)
