"""Hadamard and LogFMT, with which the formats are compared."""

import pytest
import torch
from studies.formats.baselines import hadamard, logfmt
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, reference


def draw() -> Tensor:
    return torch.randn(16, 128, generator=torch.Generator().manual_seed(0))


def error(back: Tensor, rows: Tensor) -> float:
    return float((back - rows).square().mean())


def test_hadamard_turns_groups_there_and_back():
    rows = draw()
    assert error(hadamard(rows, 8), rows) < 1e-4
    one = torch.zeros(1, 32)
    one[0, 0] = 32**0.5  # becomes 32 ones, a constant group
    torch.testing.assert_close(hadamard(one, 2), one, rtol=0, atol=1e-5)


def test_hadamard_spreads_a_large_value():
    rows = draw()
    rows[:, ::32] = 20.0
    format = Format.parse("int4:g32")
    plain = reference.decode(reference.encode(rows, format), format, 128, torch.float32)
    assert error(hadamard(rows, 4), rows) < error(plain, rows)


def test_logfmt_has_levels_that_grow_by_a_factor():
    rows = torch.tensor([[1.0, -2.0, 4.0, 8.0, 16.0, 32.0, -64.0, 0.0, 2.9, 3.1, *[1.0] * 22]])
    expected = rows.clone()
    expected[0, 8:10] = torch.tensor([2.0, 4.0])  # the nearest of seven levels, 1 to 64; the middle is 3
    torch.testing.assert_close(logfmt(rows, 4), expected)
    assert logfmt(torch.zeros(1, 32), 4).eq(0).all()
    two_bits = logfmt(rows, 2)
    torch.testing.assert_close(two_bits.abs().unique(), torch.tensor([0.0, 64.0]))


def test_logfmt_is_the_least_exact_on_normal_values_as_in_the_paper():
    rows, format = draw(), Format.parse("int4:g32")
    plain = reference.decode(reference.encode(rows, format), format, 128, torch.float32)
    assert error(logfmt(rows, 4), rows) > 3 * error(plain, rows)
    assert error(hadamard(rows, 4), rows) < 1.5 * error(plain, rows)


@pytest.mark.parametrize("baseline", [hadamard, logfmt])
def test_groups_must_divide_the_row(baseline):
    with pytest.raises(ConfigError, match="do not divide rows of 40 values"):
        baseline(torch.zeros(1, 40), 4)
