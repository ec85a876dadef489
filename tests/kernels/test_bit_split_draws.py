"""Stochastic rounding: right on average, keyed by what is rounded, and the same by kernels and by torch."""

import os

import pytest
import torch
from torch import Tensor

from fcsd.kernels.bit_split import Draws, Format, decode, encode, kernels, reference
from fcsd.kernels.bit_split.draws import philox

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"


def draw(count: int) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(0))


def test_philox_gives_the_published_words():
    place = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(0, place, place, 0, 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's known answers
    ones = place + 0xFFFFFFFF
    words = [int(word) for word in philox(2**64 - 1, ones, ones, 0xFFFFFFFF, 0xFFFFFFFF)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("name", ["int4:g32", "int3:g64:sr"])
def test_kernels_draw_as_the_reference_does(name):
    rows, format = draw(2), Format.parse(name)
    pair = torch.tensor([5, 2**31 - 1])
    expected = reference.encode(rows, format, Draws(2**40 + 3, 17, 2, 1, pair))
    assert not torch.equal(expected, reference.encode(rows, format))
    found = kernels.encode(rows.to(DEVICE), format, Draws(2**40 + 3, 17, 2, 1, pair.to(DEVICE)))
    assert torch.equal(found.cpu(), expected)


def test_draws_follow_their_row_wherever_it_lies():
    rows, format, pair = draw(6), Format.parse("int4:g32"), torch.arange(6) * 3
    order = torch.tensor([3, 0, 5, 2, 1, 4])
    records = encode(rows, format, Draws(1, 2, 3, 0, pair))
    assert torch.equal(encode(rows[order], format, Draws(1, 2, 3, 0, pair[order])), records[order])


def test_every_part_of_the_key_changes_the_draws():
    pair = torch.arange(4)
    first = Draws(1, 1, 1, 1, pair).uniform(64)
    others = [Draws(2, 1, 1, 1, pair), Draws(1, 2, 1, 1, pair), Draws(1, 1, 2, 1, pair), Draws(1, 1, 1, 2, pair)]
    for other in [*others, Draws(1 + 2**32, 1, 1, 1, pair), Draws(1, 1, 1, 1, pair + 4)]:
        assert (other.uniform(64) == first).float().mean() < 0.1
    assert len(first.unique()) > 200 and first.min() >= 0 and first.max() < 1


def test_the_average_of_many_draws_is_the_value():
    rows, format = draw(1), Format.parse("int6:g64:int")
    many = rows.expand(4096, 64)
    records = encode(many, format, Draws(0, 0, 0, 2, torch.arange(4096)))
    nearest = decode(encode(rows, format), format, 64, torch.float32)
    average = decode(records, format, 64, torch.float32).mean(0)
    step = float(reference.scale.step_of(records[0, 48:49]))
    assert (average - rows[0]).abs().max() < 0.04 * step  # five times the spread of an average of 4096 draws
    assert (nearest - rows).abs().max() > 0.4 * step
