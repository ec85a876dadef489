"""Records by torch: their layout, literally, and what they do to values."""

from decimal import Decimal, getcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, decode, encode, scale
from fcsd.kernels.bit_split.reference import join, split


def there_and_back(rows: Tensor, name: str) -> Tensor:
    format = Format.parse(name)
    return decode(encode(rows, format), format, rows.shape[1], rows.dtype)


def draw(count: int = 8, width: int = 256) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def snr(rows: Tensor, name: str) -> float:
    """Signal over error, in dB."""
    error = there_and_back(rows, name) - rows
    return float(10 * torch.log10(rows.square().sum() / error.square().sum()))


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_greatest_value_is_cut_by_what_the_page_says(bits: int) -> None:
    """In steps of the scale that is stored: bf16 rows, the ends of groups at many distances."""
    random = torch.Generator().manual_seed(bits)
    ends = torch.randn(20000, 2, generator=random).sort(dim=1).values
    between = ends[:, :1] + torch.rand(20000, 14, generator=random) * (ends[:, 1:] - ends[:, :1])
    rows = torch.cat([ends[:, :1], between, ends[:, 1:]], 1).bfloat16()
    format, levels = Format(bits, group=16), 2**bits - 1
    records = encode(rows, format)
    steps = records[:, 2 * bits : 2 * bits + 2].contiguous().view(torch.bfloat16).float()  # after the codes
    error = (rows.float() - decode(records, format, 16, torch.float32)) / steps
    top = rows == rows.amax(1, keepdim=True)
    most = levels / 256
    assert 0.9 * most < float(error[top].max()) <= most
    assert float(error[~top].abs().max()) <= max(most, 0.5001)
    assert float(-error[top].min()) <= 0.5001


def test_planes_of_eight_values():
    codes = torch.tensor([[0b0001_01_1, 0b0010_10_0, 0b0011_11_1, 0b0100_00_0, 43, 52, 63, 64]], dtype=torch.int32)
    four, two, one = split(codes, Format(7))
    assert bytes(four[0].tolist()).hex() == "21436587"  # the highest four bits of the eight codes are 1 to 8
    assert bytes(two[0].tolist()).hex() == "3939"
    assert bytes(one[0].tolist()).hex() == "55"


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_survive_their_planes(bits):
    codes = torch.arange(2 * 256, dtype=torch.int32).view(2, 256) * 37 % 2**bits
    assert torch.equal(join(torch.cat(split(codes, Format(bits)), 1), Format(bits), 256), codes)


def test_a_record_with_spikes_and_integer_scales():
    values = [-5, 10, 0, -100, 1, 200, 2, 3, 4, 5, 6, 7, 8, 9, -1, -2]
    format = Format.parse("int4:g16:sr")
    record = encode(torch.tensor([values]).float(), format)
    codes, spikes = "f0555687a9cbed34", "c8c24843"  # value + 5; -100 and 200 as bf16
    assert bytes(record[0].tolist()).hex() == codes + "80" + "05" + spikes + "03" + "05"
    assert decode(record, format, 16, torch.float32)[0].tolist() == values


def test_a_record_with_bf16_scales_and_padding():
    codes = [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    rows = torch.tensor([codes]) * 0.5 - 1
    record = encode(rows, Format.parse("int3:g16"))
    assert bytes(record[0].tolist()).hex() == "50faaf05" + "aa55" + "003f" + "80bf" + "00" * 6
    assert torch.equal(decode(record, Format.parse("int3:g16"), 16, torch.float32), rows)


@pytest.mark.parametrize("name", ["int8:g32:int", "int7:g64:int", "int6:int"])
def test_with_six_bits_and_more_no_error_exceeds_half_a_step(name):
    rows, format = draw(), Format.parse(name)
    layout = format.layout(256)
    step = scale.step_of(encode(rows, format)[:, layout.scales : layout.zeros]).repeat_interleave(format.group, 1)
    assert ((there_and_back(rows, name) - rows).abs() <= step * 0.50001).all()


@pytest.mark.parametrize("name", ["int8:sr", "int5:g32:sr", "int3:g64:sr:bf16", "int2:g64:sr:clip0.7"])
def test_the_ends_of_each_group_are_kept(name):
    rows = draw().bfloat16()
    rows[:, 7], rows[:, 9] = 300, -500
    groups = rows.view(8, -1, Format.parse(name).group)
    back = there_and_back(rows, name).view_as(groups)
    for end in (groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)):
        assert ((groups == end) & (back == end)).any(2).all()  # one of them, if several are equal


@pytest.mark.parametrize("name", ["int8", "int4:g128", "int4:g32:int", "int3:g32:sr", "int2:g32:sr:bf16"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_makes_its_group_nan_and_no_other(value, name):
    rows, group = draw(2), Format.parse(name).group
    rows[1, 3] = value
    back = there_and_back(rows, name)
    assert back[1, :group].isnan().all()
    assert back[1, group:].isfinite().all() and back[0].isfinite().all()


def test_a_range_beyond_the_scale_is_nan_and_never_clipped():
    rows = draw(1, 32)
    rows[0, 0], rows[0, 1] = -10000, 10000
    assert there_and_back(rows, "int2:g32:int").isnan().all()
    assert there_and_back(rows, "int3:g32:int").isfinite().all()
    rows[0, 0], rows[0, 1] = -3e38, 3e38
    assert there_and_back(rows, "int8:g32").isnan().all()
    assert there_and_back(rows, "int8:g32:sr").isfinite().all()  # as spikes they are not part of the range


@pytest.mark.parametrize("name", ["int2:g32", "int8:g32"])
@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, -0.15625, 2.0**100])
def test_a_constant_group_is_exact(value, name):
    rows = torch.full((1, 32), value).bfloat16()
    assert there_and_back(rows, name).eq(rows).all()


@pytest.mark.parametrize("name", ["int8:g32:int", "int8:g32:sr", "int8:g32"])
def test_negative_zero_and_subnormal_values_become_zero(name):
    rows = torch.tensor([[-0.0, 1e-40, -1e-40, 0.0] * 8])
    assert there_and_back(rows, name).view(torch.int32).eq(0).all()


def test_ties_go_to_the_even_code():
    rows = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.5, 254.5, 255.0] + [0.0] * 9])
    assert there_and_back(rows, "int8:g16")[0, :7].tolist() == [0, 0, 2, 2, 4, 254, 255]


def test_one_sided_groups_keep_code_zero_for_zero_with_integer_scales():
    rows = draw().abs() + 5
    assert (there_and_back(rows, "int8:g32:int") - rows).abs().max() < 0.03
    assert (there_and_back(-rows, "int8:g32:int") + rows).abs().max() < 0.03


def test_nothing_is_a_batch_too():
    record = encode(torch.empty(0, 64), Format.parse("int4"))
    assert record.shape == (0, 40 + 8) and decode(record, Format.parse("int4"), 64, torch.bfloat16).shape == (0, 64)


def test_groups_that_do_not_divide_the_row_are_refused():
    with pytest.raises(ConfigError, match="do not divide rows of 48 values"):
        encode(torch.zeros(1, 48), Format.parse("int5"))
    with pytest.raises(ConfigError, match="do not divide rows of 48 values"):
        decode(torch.zeros(1, 48, dtype=torch.uint8), Format.parse("int5"), 48, torch.float32)


def test_mantissas_are_those_of_powers_of_two():
    getcontext().prec = 30
    powers = [Decimal(2) ** (Decimal(j) / 10) for j in range(10)]
    assert tuple(int(((power - 1) * 2**23).to_integral_value()) for power in powers) == scale.MANTISSAS
    half = Decimal(2) ** (Decimal(1) / 20)
    assert abs(Decimal(scale.HALF_CODE) - half) < Decimal(2) ** -24


@pytest.mark.parametrize("rounding", ["floor", "nearest", "ceil"])
def test_scale_bytes_are_those_of_a_logarithm(rounding):
    steps = torch.exp(torch.empty(20000).uniform_(-8, 8, generator=torch.Generator().manual_seed(0)))
    logarithm = steps.double().log2() * 10 + 128
    by_logarithm = {"floor": logarithm.floor(), "nearest": (logarithm + 0.5).floor(), "ceil": logarithm.ceil()}
    assert torch.equal(scale.code_of(steps, rounding).double(), by_logarithm[rounding])
    every = torch.arange(255, dtype=torch.int32)
    assert torch.equal(scale.code_of(scale.step_of(every), rounding), every)


def test_how_a_scale_is_rounded_is_what_serves_its_width(monkeypatch):
    rows, found = draw(64), {}
    for rounding in ("floor", "nearest", "ceil"):
        monkeypatch.setattr(Format, "rounding", rounding)
        found[rounding] = snr(rows, "int8:g32:int"), snr(rows, "int3:g32:int")
    assert found["floor"][0] + 5 < found["nearest"][0] < found["ceil"][0] - 5
    assert found["floor"][1] > found["nearest"][1] > found["ceil"][1]


def test_more_bits_and_smaller_groups_are_more_exact():
    rows = draw(64)
    by_width = [snr(rows, f"int{bits}:g64") for bits in range(2, 9)]
    assert all(more > less + 4 for less, more in pairwise(by_width))
    assert snr(rows, "int4:g32") > snr(rows, "int4:g64") > snr(rows, "int4:g128") > snr(rows, "int4:g256")


def test_spike_reserving_pays_where_few_values_are_large():
    rows = draw(64)
    rows[:, ::128] *= 50
    assert snr(rows, "int3:g128:sr") > snr(rows, "int3:g128") + 5
