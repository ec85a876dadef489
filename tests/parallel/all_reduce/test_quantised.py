"""Every rank ends a quantised all-reduce with the bits of the reference, over gloo."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.comm import all_reduce
from ranks import in_group
from studies.formats.simulated_all_reduce import simulate_all_reduce
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.parallel.all_reduce import quantised
from fcsd.parallel.all_reduce.quantised import cut
from fcsd.parallel.all_reduce.reduce import reduce

# (format, shape, dtype, ranks). One row is cut into pieces, or, where it has a single group, is the share of one rank
# alone; 15 rows do not divide evenly among 4 ranks.
CASES = [
    ("int8", (2, 6, 256), torch.bfloat16, 4),
    ("int5", (3, 5, 256), torch.bfloat16, 4),
    ("int4", (1, 1, 256), torch.bfloat16, 4),
    ("int6:sr", (1, 128), torch.float32, 4),
    ("int3:g64:sr", (7, 128), torch.bfloat16, 2),
    ("int8", (3, 128), torch.float32, 2),
    ("int2:g32:sr", (9, 256), torch.float32, 4),
    ("int8", (0, 256), torch.bfloat16, 4),
]


def _drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """This rank's summands; some values are much larger than the others, as activations are."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(rank))
    return torch.where(x > 2, x * 50, x).to(dtype)


def _reference(format: str, shape: tuple[int, ...], dtype: torch.dtype, ranks: range) -> Tensor:
    partials = torch.stack([_drawn(rank, shape, dtype) for rank in ranks])
    return simulate_all_reduce(partials, Format.parse(format))


def _found(rank: int) -> dict[str, Any]:
    """What one of four ranks computes. The ranks 0 and 1, and 2 and 3, are two groups of two ranks."""
    groups = {2: _pair(rank), 4: dist.group.WORLD}
    sums, sent = [], []
    for format, shape, dtype, ranks in CASES:
        x = _drawn(rank, shape, dtype)
        with _Counted(rank) as counted:
            quantised.all_reduce(x, Format.parse(format), groups[ranks]).wait()
        sums.append(x)
        sent.append((counted.across, counted.collectives))
    bench = all_reduce.bench(0.0625, torch.device("cpu"), formats=("int5", "int4"), repeats=1)
    return {"sums": sums, "sent": sent, "reduce": _kinds(rank), "bench": bench}


def _pair(rank: int) -> Any:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pairs[rank // 2]


def _kinds(rank: int) -> dict[str, Tensor]:
    """The kind of ``reduce``, with two all-reduces in flight at once, and the gradient of one."""
    group = dist.group.WORLD
    stream = _drawn(rank, (2, 3, 128), torch.float32).requires_grad_()
    first = reduce(stream * 1, group, "quantised:int5")
    second = reduce(stream * 2, group, "quantised:int8", layer=1)
    values = {"first": first.wait(), "second": second.wait()}
    values["second"].backward(_drawn(10 + rank, (2, 3, 128), torch.float32))
    assert stream.grad is not None
    values["identity"] = stream.grad / 2
    return {name: value.detach().clone() for name, value in values.items()}


class _Counted:
    """Counts the bytes that this rank hands to torch.distributed for ranks of the other node of two.

    ``collectives`` has the name of each collective, and the bytes that it sends to every rank.
    """

    def __init__(self, rank: int) -> None:
        self.across, self._node = 0, rank // 2
        self.collectives: list[tuple[str, int]] = []

    def __enter__(self) -> "_Counted":
        self._real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}
        for name, real in self._real.items():
            setattr(dist, name, self._counting(real, shares=name == "all_to_all_single"))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _counting(self, real: Callable[..., Any], shares: bool) -> Callable[..., Any]:
        def counting(received: Tensor, sent: Tensor, group: Any, async_op: bool = False) -> Any:
            ranks = dist.get_process_group_ranks(group)
            others = sum(rank // 2 != self._node for rank in ranks)
            to_each = sent.nbytes // len(ranks) if shares else sent.nbytes
            self.across += others * to_each
            self.collectives.append((real.__name__, to_each))
            return real(received, sent, group=group, async_op=async_op)

        return counting


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return in_group(4, _found)


def test_all_ranks_end_with_the_bits_of_the_reference(ranks: list[dict[str, Any]]) -> None:
    for number, (format, shape, dtype, size) in enumerate(CASES):
        for rank, found in enumerate(ranks):
            first = rank - rank % size
            expected = _reference(format, shape, dtype, range(first, first + size))
            assert torch.equal(found["sums"][number], expected), (format, rank)
            assert torch.equal(found["sums"][number], ranks[first]["sums"][number])


def test_the_reference_rounds_a_sum_of_two_ranks_once_and_of_more_twice() -> None:
    format, partials = Format.parse("int4"), torch.stack([_drawn(rank, (2, 128), torch.float32) for rank in range(3)])
    first, second, third = (decode(encode(one, format), format, 128, torch.float32) for one in partials)
    assert torch.equal(simulate_all_reduce(partials[:2], format), first + second)
    twice = decode(encode(first + second + third, format), format, 128, torch.float32)
    assert torch.equal(simulate_all_reduce(partials, format), twice)


def test_a_quantised_sum_is_close_to_the_sum(ranks: list[dict[str, Any]]) -> None:
    partials = [_drawn(rank, *CASES[0][1:3]).float() for rank in range(4)]
    error = ranks[0]["sums"][0].float() - sum(partials)
    assert 0 < error.norm() < 0.02 * torch.stack(partials).sum(0).norm()


def test_the_kind_of_reduce_quantises_values_and_passes_gradients_on(ranks: list[dict[str, Any]]) -> None:
    partials = torch.stack([_drawn(rank, (2, 3, 128), torch.float32) for rank in range(4)])
    for rank, found in enumerate(ranks):
        kinds = found["reduce"]
        assert torch.equal(kinds["first"], simulate_all_reduce(partials, Format.parse("int5")))
        assert torch.equal(kinds["second"], simulate_all_reduce(partials * 2, Format.parse("int8")))
        assert torch.equal(kinds["identity"], _drawn(10 + rank, (2, 3, 128), torch.float32))


def test_two_steps_send_two_shares_and_one_step_sends_all_rows_once(ranks: list[dict[str, Any]]) -> None:
    """2M from one half of four ranks to the other (table 5); M is one rank's records, a share is M / 4."""
    volumes = []
    for format, shape, *_ in CASES[0], CASES[5]:
        volumes.append(math.prod(shape[:-1]) * Format.parse(format).row_bytes(shape[-1]))
    (first, collectives), (second, _) = (ranks[rank]["sent"][0] for rank in (0, 1))
    assert first + second == 2 * volumes[0]
    share = volumes[0] // 4
    assert collectives == [("all_to_all_single", share), ("all_gather_into_tensor", share)]
    assert ranks[3]["sent"][5] == (0, [("all_gather_into_tensor", volumes[1])])


def _wrong_on_eight(rank: int) -> list[str]:
    """The cases in which eight ranks get other bits than the reference."""
    problems = []
    for format, shape, dtype, _ in CASES[2:5]:
        x = _drawn(rank, shape, dtype)
        quantised.all_reduce(x, Format.parse(format), dist.group.WORLD).wait()
        if not torch.equal(x, _reference(format, shape, dtype, range(8))):
            problems.append(f"{format} {shape}")
    return problems


@pytest.mark.nightly
def test_eight_ranks_end_with_the_bits_of_the_reference() -> None:
    assert [problem for problems in in_group(8, _wrong_on_eight) for problem in problems] == []


def test_the_benchmark_times_every_way_and_format(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["bench"]
    assert list(found) == ["nccl", "quantised:int5 in steps", "quantised:int4 in steps"]
    assert all(0 < time.low <= time.median <= time.high for time in found.values())
    second = {"nccl": found["nccl"], list(found)[1]: None}
    table = all_reduce.to_text({"0.0625 MiB": found, "1 MiB": second}).splitlines()
    assert len(table) == 5 and table[-1] == "on the wire: int5 5.25, int4 5 bits per value"
    assert [line.split()[-1] for line in table[1:4]] == ["(1.00x)", "wrong", "-"]


def test_rows_are_cut_only_where_ranks_do_not_divide_them() -> None:
    format = Format.parse("int4")  # groups of 32
    assert cut(torch.ones(8, 256), format, 4).shape == (8, 256)
    assert cut(torch.ones(1, 256), format, 4).shape == (4, 64)
    assert cut(torch.ones(6, 256), format, 4).shape == (12, 128)
    assert cut(torch.ones(3, 32), format, 4).shape == (3, 32)
    assert cut(torch.ones(0, 256), format, 4).shape == (0, 256)


def test_formats_that_do_not_suit_are_refused() -> None:
    with pytest.raises(ConfigError, match='"fp8" is not a format'):
        reduce(torch.ones(2, 128), None, "quantised:fp8")
    with pytest.raises(ConfigError, match="do not divide rows of 96 values"):
        quantised.all_reduce(torch.ones(2, 96), Format.parse("int8"), None)
