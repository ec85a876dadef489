"""Kernels that encode where rows are packed, and decode where they are ordered, give the bits of two steps in torch."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.bit_split import Format, kernels, moves

WIDTH, ROWS, MOST = 96, 4, 3
# The records of each row; the second row has two, and the third has none.
PLACES = torch.tensor([[5, 0, 2], [-1, 1, 4], [-1, -1, -1], [3, 6, 7]])
COUNT = 8


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and their weights. The last row has a value that is not finite, and one of the weights is subnormal."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    rows[3, 40] = float("nan")
    rows[0, 3:9] *= 500
    weight = torch.rand(ROWS, MOST, generator=generator)
    weight[0, 1] = 2.0**-130
    return rows.to(dtype), weight


def equal_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bits, but for the payload of NaN, which a GPU's rounding sets."""
    bits = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    return torch.equal(*(x.where(~x.isnan(), torch.nan).view(bits) for x in (found, expected)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8:g32", torch.bfloat16),
        ("int5:g32", torch.float32),
        ("int4:g32", torch.bfloat16),
        ("int7:g32:int", torch.float32),
        ("int3:g32:sr", torch.bfloat16),
    ],
)
def test_one_kernel_gives_the_bits_of_two_steps(name: str, dtype: torch.dtype) -> None:
    format, (rows, weights) = Format.parse(name), draw(dtype)
    places = PLACES.to(DEVICE)
    for weight in (None, weights):
        expected = moves.encode_at(rows, format, weight, PLACES, COUNT)
        on_device = None if weight is None else weight.to(DEVICE)
        records = kernels.encode(rows.to(DEVICE), format, weight=on_device, places=places, count=COUNT)
        assert torch.equal(records.cpu(), expected)
        sums = kernels.decode_sum(records, format, WIDTH, dtype, on_device, places).cpu()
        assert sums[3].isnan().any() and not sums[2].any()
        assert equal_bits(sums, moves.decode_sum(expected, format, WIDTH, dtype, weight, PLACES))
    source = torch.tensor([4, -1, 7, 0, 1, -1, 2])
    ordered = kernels.decode(records, format, WIDTH, dtype, source.to(DEVICE)).cpu()
    assert equal_bits(ordered, moves.decode_from(expected, format, WIDTH, dtype, source))
    assert not ordered[1].any()


@pytest.mark.parametrize("name", ["int8:g32", "int5:g32", "int3:g32:sr"])
def test_records_of_ranks_are_added_and_encoded_as_in_two_steps(name: str) -> None:
    format = Format.parse(name)
    rows = torch.cat([draw(torch.float32)[0], draw(torch.float32)[0].flip(1) * 3])
    records = moves.encode_at(rows, format, None, torch.arange(2 * ROWS)[:, None], 2 * ROWS).view(2, ROWS, -1)
    added = [moves.decode_from(one, format, WIDTH, torch.float32, torch.arange(ROWS)) for one in records]
    for dtype in (torch.bfloat16, torch.float32):
        sums, found = (torch.empty(ROWS, WIDTH, dtype=dtype, device=device) for device in ("cpu", DEVICE))
        moves.decode_ranks(records, format, sums)
        assert equal_bits(sums, (added[0] + added[1]).to(dtype))
        kernels.decode(records.flatten(0, 1).to(DEVICE), format, WIDTH, dtype, out=found, ranks=2)
        assert equal_bits(found.cpu(), sums)
    expected, encoded = torch.empty_like(records[0]), torch.empty_like(records[0], device=DEVICE)
    moves.encode_sum(records, format, WIDTH, expected)
    kernels.encode_sum(records.to(DEVICE), format, WIDTH, encoded)
    assert torch.equal(encoded.cpu(), expected)
    assert torch.equal(expected, moves.encode_at(added[0] + added[1], format, None, torch.arange(ROWS)[:, None], ROWS))


def test_scalar_products_with_records() -> None:
    format, (rows, _) = Format.parse("int5:g32"), draw(torch.float32)
    rows = rows.nan_to_num()
    records = moves.encode_at(rows, format, None, PLACES, COUNT)
    dots = kernels.decode_dots(records.to(DEVICE), format, rows.flip(0).to(DEVICE), PLACES.to(DEVICE)).cpu()
    expected = moves.decode_dots(records, format, rows.flip(0), PLACES)
    torch.testing.assert_close(dots, expected, rtol=1e-5, atol=1e-4)
    assert dots[1, 0] == 0 and dots[1, 1] != 0 and not dots[2].any()


def test_no_launch_parameter_changes_a_bit() -> None:
    """A program holds more than a row, a row, or a part of it, and a thread holds one word of a group or several."""
    format, rows = Format.parse("int5:g64"), torch.randn(2, 320, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = kernels.encode(rows, format)
    for launch in (kernels.Launch(64, 1, 1), kernels.Launch(128, 2, 2), kernels.Launch(1024, 8, 8)):
        assert torch.equal(kernels.encode(rows, format, launch=launch), expected)
        decoded = kernels.decode(expected, format, 320, torch.bfloat16, launch=launch)
        assert torch.equal(decoded, kernels.decode(expected, format, 320, torch.bfloat16))


def test_the_two_steps_of_the_reference() -> None:
    """What is expected above is right: records are those of the moved rows, and sums those of decoded rows."""
    format, (rows, weight) = Format.parse("int8:g32"), draw(torch.float32)
    records = moves.encode_at(rows, format, weight, PLACES, COUNT)
    decoded = moves.decode_from(records, format, WIDTH, torch.float32, torch.arange(COUNT))
    torch.testing.assert_close(decoded[2], rows[0] * weight[0, 2], rtol=0, atol=3.0)  # steps of up to 5 at the spikes
    torch.testing.assert_close(decoded[4], rows[1] * weight[1, 2], rtol=0, atol=0.05)
    sums = moves.decode_sum(records, format, WIDTH, torch.float32, None, PLACES)
    assert torch.equal(sums[1], decoded[1] + decoded[4])
