"""Rows that a codec packs into records arrive as the rows that were sent, by every transport, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_buffers import opener
from ranks import in_group
from torch import Tensor

from fcsd.parallel import order
from fcsd.parallel.deferred import Codec, Exchange, exchange_now, launch
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.transport import Transport, all_to_all, splits_of

WIDTH = 6
MATRIX = [[2, 3], [0, 4]]  # rows from each rank to each


@dataclass(frozen=True)
class Checked:
    """Rows rounded to bf16, as bytes, with a checksum behind each row: a record has an odd number of bytes."""

    def encode(self, rows: Tensor) -> Tensor:
        data = rows.bfloat16().view(torch.uint8)
        return torch.cat([data, _checksum(data)], dim=1)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        data, sums = records[:, : 2 * width].contiguous(), records[:, 2 * width :]
        assert torch.equal(sums, _checksum(data)), "a record was changed on its way"
        return data.view(torch.bfloat16).to(dtype)


def _checksum(data: Tensor) -> Tensor:
    return data.sum(dim=1, keepdim=True).to(torch.uint8)


@dataclass(frozen=True)
class Seen:
    """A transport, and the dtype and width of what it was given."""

    inner: Transport
    given: list[tuple[torch.dtype, int]]

    def __call__(self, rows: Tensor, *args: Any) -> Any:
        self.given.append((rows.dtype, rows.shape[1]))
        return self.inner(rows, *args)


def _pass(rank: int, send: Callable[[Tensor, Exchange], Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """What one exchange brings, and the gradient that comes back."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(sum(exchange.there.sends), WIDTH, generator=generator, requires_grad=True)
    received = send(rows, exchange)
    upstream = torch.randn(received.shape, generator=generator)
    received.backward(upstream)
    assert rows.grad is not None
    return received.detach().clone(), rows.grad


def _found(rank: int, folder: str) -> list[str]:
    there, back = splits_of(MATRIX, rank), splits_of([list(column) for column in zip(*MATRIX, strict=True)], rank)
    plain = Exchange("dispatch", 0, dist.group.WORLD, there, back, kept=False)
    problems = []
    copies = CopiesTransport(opener(folder))
    for codec, back_codec in ((None, None), (Checked(), None), (None, Checked()), (Checked(), Checked())):
        both = replace(plain, codec=codec, back_codec=back_codec)
        received, gradient = _pass(rank, exchange_now, both)
        for name, transport in (("all_to_all", all_to_all), ("copies", copies), ("copies, larger buffers", copies)):
            for eager, kept in ((False, False), (False, True), (True, False)):
                seen = Seen(transport, [])
                exchange = replace(both, transport=seen, eager=eager, kept=kept)
                found = _pass(rank, lambda rows, e: launch(rows, e, order.mark()).wait(), exchange)
                case = f"{name}, codecs {codec} {back_codec}, eager {eager}, kept {kept}"
                if not (torch.equal(found[0], received) and torch.equal(found[1], gradient)):
                    problems.append(case)
                if seen.given != [_record(codec), _record(back_codec)]:
                    problems.append(f"{case}: the transport was given {seen.given}")
    problems += _against_the_plain_exchange(rank, plain)
    return problems


def _record(codec: Codec | None) -> tuple[torch.dtype, int]:
    return (torch.float32, WIDTH) if codec is None else (torch.uint8, 2 * WIDTH + 1)


def _against_the_plain_exchange(rank: int, plain: Exchange) -> list[str]:
    """The codec's only effect is its rounding."""
    received, gradient = _pass(rank, exchange_now, plain)
    coded = _pass(rank, exchange_now, replace(plain, codec=Checked(), back_codec=Checked()))
    expected = received.bfloat16().float(), gradient.bfloat16().float()
    same = all(torch.equal(one, other) for one, other in zip(coded, expected, strict=True))
    return [] if same and not torch.equal(received, coded[0]) else ["the codec does not round to bf16"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return in_group(2, _found, str(tmp_path_factory.mktemp("buffers")))


def test_records_travel_unchanged_by_every_transport(two_ranks: list[list[str]]) -> None:
    assert [problem for rank in two_ranks for problem in rank] == []
