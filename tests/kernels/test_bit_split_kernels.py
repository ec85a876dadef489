"""Records by kernels (compiled on a GPU, else in Triton's interpreter) are those of torch, bit for bit.

``python -m benchmarks.kernels.formats`` makes the same comparison for every format on a GPU.
"""

import pytest
import torch
from benchmarks.kernels.formats import all_formats, differences
from kernel_device import DEVICE

from fcsd.kernels.bit_split import Format, kernels, reference, scale


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        *(("g32", bits) for bits in range(2, 9)),
        # with spikes: an odd width, and the widest
        *(pytest.param("g32:sr", bits, marks=[] if bits in (5, 8) else pytest.mark.nightly) for bits in range(2, 9)),
    ],
)
def test_kernels_equal_the_reference_at_every_width(options, bits):
    assert differences(f"int{bits}:{options}", DEVICE, 96) == []  # three groups: the program's fourth is masked


@pytest.mark.parametrize("name", ["int5:g64:int", "int6:g64:sr:bf16", "int4:g128:int", "int7:g256:sr"])
def test_kernels_equal_the_reference_with_other_groups_and_scales(name):
    assert differences(name, DEVICE, Format.parse(name).group) == []


@pytest.mark.parametrize("name", ["int2:g64:sr:clip0.7", "int3:g16:sr:bf16:clip0.6"])
def test_kernels_equal_the_reference_with_clipping(name):
    assert differences(name, DEVICE, 64) == []


def test_rows_of_several_programs():
    rows, format = torch.randn(1, 2304, generator=torch.Generator().manual_seed(0)), Format.parse("int5:g256:sr")
    records = kernels.encode(rows.to(DEVICE), format)
    assert torch.equal(records.cpu(), reference.encode(rows, format))
    back = kernels.decode(records, format, 2304, torch.float32)
    assert torch.equal(back.cpu(), reference.decode(records.cpu(), format, 2304, torch.float32))


@pytest.mark.parametrize("name", ["int3:g16:int", "int4:g16:int", "int8:g16:int"])  # floor, nearest, ceil
def test_steps_of_every_mantissa(name):
    format = Format.parse(name)
    factors = 2 ** (torch.arange(64) / 13 - 2)
    rows = (torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * factors[:, None]).view(1, -1)
    records = reference.encode(rows, format)
    layout = format.layout(1024)
    assert {(int(byte) - 128) % 10 for byte in records[0, layout.scales : layout.zeros]} == set(range(10))
    assert torch.equal(kernels.encode(rows.to(DEVICE), format).cpu(), records)
    back = kernels.decode(records.to(DEVICE), format, 1024, torch.float32)
    assert torch.equal(back.cpu(), reference.decode(records, format, 1024, torch.float32))


@pytest.mark.parametrize("name", ["int2:g16:int", "int3:g16:int"])  # both take the floor
def test_a_step_for_which_a_scale_stands_exactly_gets_its_byte(name):
    format, codes = Format.parse(name), torch.arange(118, 128)  # one of every mantissa
    steps = scale.step_of(codes)
    near = torch.stack([steps * format.levels, torch.nextafter(steps * format.levels, torch.zeros(()))])
    exact = near * (1 / format.levels) == steps
    chosen = exact.any(0)
    assert chosen.sum() > 5  # of some steps no greatest value is so many
    rows = torch.zeros(int(chosen.sum()), 16)
    rows[:, 0] = near.gather(0, exact.int().argmax(0, keepdim=True))[0][chosen]
    layout = format.layout(16)
    for records in (reference.encode(rows, format), kernels.encode(rows.to(DEVICE), format).cpu()):
        assert records[:, layout.scales : layout.zeros].flatten().tolist() == codes[chosen].tolist()


def test_bf16_is_rounded_to_nearest_and_no_rows_are_rows():
    format = Format.parse("int8:g16")
    rows = torch.full((1, 16), 1 + 3 * 2**-9, device=DEVICE)  # between two bf16 numbers; a cut would give the lower
    assert kernels.decode(kernels.encode(rows, format), format, 16, torch.bfloat16)[0, 0] == 1 + 2**-7
    assert kernels.decode(kernels.encode(rows[:0], format), format, 16, torch.bfloat16).shape == (0, 16)


def test_the_benchmark_compares_every_width_and_group_once():
    formats = [Format.parse(name) for name in all_formats()]
    assert len(set(formats)) == len(formats)
    assert {(format.bits, format.group) for format in formats} >= {
        (bits, group) for bits in range(2, 9) for group in (32, 64, 128)
    }
