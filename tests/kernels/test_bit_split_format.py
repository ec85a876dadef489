"""Names, bytes and errors of the formats."""

import re
from itertools import product

import pytest
from studies.formats.directions import parse_directions

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.format import format_of_reduction


@pytest.mark.parametrize(
    "text, format",
    [
        ("int8", Format(8, 128)),
        ("int5", Format(5, 128)),
        ("int4", Format(4, 32)),
        ("int4:g128", Format(4, 128)),
        ("int4:g32:int", Format(4, 32, meta="int")),
        ("int3:g128:sr", Format(3, 128, spikes=True, meta="int")),
        ("int2:sr:bf16", Format(2, 32, spikes=True)),
        ("int2:g64:sr:clip0.7", Format(2, 64, spikes=True, meta="int", clip=0.7)),
        ("int2:clip0.7:sr:g64", Format(2, 64, spikes=True, meta="int", clip=0.7)),
    ],
)
def test_names_are_read(text, format):
    assert Format.parse(text) == format


@pytest.mark.parametrize("text", ["int8", "int4", "int4:g128", "int5:g32:int", "int3:g128:sr", "int2:g64:sr:clip0.7"])
def test_a_name_is_written_as_it_is_read(text):
    assert str(Format.parse(text)) == text


def test_every_format_is_read_from_its_name():
    for bits, group, spikes, meta in product(range(2, 9), (16, 32, 64, 128, 256), (False, True), ("bf16", "int")):
        format = Format(bits, group, spikes, meta, 0.25 if spikes and bits < 4 else 1.0)
        assert Format.parse(str(format)) == format


@pytest.mark.parametrize(
    "text, said",
    [
        ("fp8", "must start with int2 to int8"),
        ("int", "must start with int2 to int8"),
        ("int12", "must start with int2 to int8"),
        ("int9", "2 to 8 bits, not 9"),
        ("int4:g48", "not 48"),
        ("int4:128", '"128" is unknown'),
        ("int4:g32:g32", '"g32" is unknown or repeated'),
        ("int4:", '"" is unknown'),
        ("int3:clip0.7", "only formats of 2 or 3 bits with spike reserving"),
        ("int4:sr:clip0.7", "only formats of 2 or 3 bits with spike reserving"),
        ("int3:sr:clip0", "not to 0.0"),
        ("int3:sr:clip1.5", "not to 1.5"),
        ("int\N{FULLWIDTH DIGIT FOUR}", "must start with int2 to int8"),
        ("int4:g\N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT TWO}", "is unknown or repeated"),
        ("int3:sr:clip0.\N{FULLWIDTH DIGIT SEVEN}", "is unknown or repeated"),
    ],
)
def test_what_is_no_format_is_refused(text, said):
    with pytest.raises(ConfigError, match=said) as refused:
        Format.parse(text)
    assert "int3:g128:sr" in str(refused.value.hint)


def test_formats_are_read_for_each_direction_and_in_the_name_of_a_reduction():
    assert parse_directions("there=int8, back=int4:g64", ("there", "back")) == {
        "there": Format(8),
        "back": Format(4, 64),
    }
    for text, said in (
        ("int8", '"int8"'),
        ("there=int8,there=int4", '"there"'),
        ("up=int8", '"up"'),
        ("there=int8,", '""'),
    ):
        with pytest.raises(ConfigError, match=f"the direction {said} is unknown or repeated"):
            parse_directions(text, ("there", "back"))
    assert format_of_reduction("quantised:int5:g32") == Format(5, 32) and format_of_reduction("nccl") is None
    for text in ("quantised", "quantised:", "quantised:int\N{FULLWIDTH DIGIT FIVE}"):
        with pytest.raises(ConfigError, match="is not a format"):
            format_of_reduction(text)


# Bytes of 4096 values (FlashCommunication V2, Table 4, and the same arithmetic for the other widths).
COLUMNS = ("g128:bf16", "g32:bf16", "g32:int", "g128:sr:int", "g64:sr:int", "g32:sr:int", "g32:sr:bf16")
BYTES = {
    2: (1152, 1536, 1280, 1280, 1536, 2048, 2560),
    3: (1664, 2048, 1792, 1792, 2048, 2560, 3072),
    4: (2176, 2560, 2304, 2304, 2560, 3072, 3584),
    5: (2688, 3072, 2816, 2816, 3072, 3584, 4096),
    6: (3200, 3584, 3328, 3328, 3584, 4096, 4608),
    7: (3712, 4096, 3840, 3840, 4096, 4608, 5120),
    8: (4224, 4608, 4352, 4352, 4608, 5120, 5632),
}


@pytest.mark.parametrize("bits", BYTES)
def test_bytes_of_4096_values(bits):
    formats = [Format.parse(f"int{bits}:{options}") for options in COLUMNS]
    assert tuple(format.row_bytes(4096) for format in formats) == BYTES[bits]
    assert all(format.bits_per_value == format.row_bytes(4096) * 8 / 4096 for format in formats)


def test_the_papers_int2_takes_four_bits_with_integer_scales_and_five_with_bf16():
    assert Format.parse("int2:g32:sr").bits_per_value == 4.0
    assert Format.parse("int2:g32:sr:bf16").bits_per_value == 5.0


def test_a_record_is_padded_to_16_bytes():
    format = Format.parse("int3:g16")
    layout = format.layout(48)
    assert layout == ((0, 12), 18, 24, 30, 30, 30, 32) and layout.bytes == format.row_bytes(48)


def test_groups_must_divide_the_row():
    with pytest.raises(ConfigError, match="int5 do not divide rows of 2880 values") as refused:
        Format.parse("int5").row_bytes(2880)
    assert "int5:g64" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="rows of 40 values") as refused:
        Format.parse("int4").row_bytes(40)
    assert "multiple of 16" in str(refused.value.hint)


def test_the_page_lists_the_bits_sent(repo):
    page = (repo / "benchmarks/results/quantised_communication.md").read_text()
    table = page.split("## Bits as sent")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if re.match(r"\| \d ", line)]
    rows = [line.replace("*", "").strip("|").split("|") for line in lines]
    assert [int(row[0]) for row in rows] == list(range(8, 1, -1))
    for bits, *found in rows:
        formats = [Format.parse(f"int{bits.strip()}:{options}") for options in COLUMNS]
        assert [float(value) for value in found] == [format.bits_per_value for format in formats]
