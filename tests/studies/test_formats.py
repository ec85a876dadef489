"""studies/formats/FORMATS_QUALITY.md says what the stored study of quantised communication found."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from studies.formats import bandwidths, tables
from studies.formats import page as wires_page
from studies.formats.plan import TABLE_7

from fcsd.kernels.bit_split import Format

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def stored(repo: Path) -> dict[str, Any]:
    return json.loads((repo / "benchmarks/results/wires_quality.json").read_text())


def nats(stored: dict[str, Any], direction: str, format: str) -> float:
    (found,) = [p["nats"] for p in stored["losses"] if (p["direction"], p["format"]) == (direction, format)]
    return found


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    page = (repo / wires_page.PAGE).read_text()
    assert wires_page.filled(page, wires_page.sections(repo)) == page, "run python -m studies.formats.page"


def test_the_stored_bits_are_those_of_the_formats(stored: dict[str, Any]) -> None:
    own = [piece for piece in stored["losses"] if piece["format"].startswith("int")]
    assert len(own) > 50
    assert all(piece["bits_on_the_wire"] == Format.parse(piece["format"]).bits_per_value for piece in own)
    assert [row["format"] for row in stored["scores"]] == [None, *(row.format for row in TABLE_7)]


def test_what_the_page_says_of_the_orders(stored: dict[str, Any]) -> None:
    """The all-reduce costs more than dispatch, and spike reserving less than rounding, and that less than LogFMT."""
    for format in ("int5", "int4:g128", "int3:g128", "int2:g128", "int4:g32", "int3:g32", "int2:g32"):
        assert nats(stored, "all-reduce", format) > nats(stored, "dispatch", format)
    for bits in (3, 2):
        formats = [f"int{bits}:g32:sr", f"int{bits}:g32", f"logfmt{bits}:g32"]
        losses = [nats(stored, "all-reduce", format) for format in formats]
        assert losses == sorted(losses)


def test_a_format_is_best_if_none_of_its_size_or_less_loses_less() -> None:
    points = [(4.0, 0.5), (2.5, 0.7), (4.5, 0.6), (8.25, 0.1), (4.0, 0.4), (6.0, 0.4)]
    found = tables.pareto([{"bits_on_the_wire": bits, "nats": nats} for bits, nats in points])
    assert [(piece["bits_on_the_wire"], piece["nats"]) for piece in found] == [(8.25, 0.1), (4.0, 0.4), (2.5, 0.7)]


def test_speeds_of_stored_collectives_stand_beside_those_of_the_paper() -> None:
    about = {"environment": {"gpus": [{"name": "NVIDIA H200"}]}, "world": 2}
    timed = {
        "nccl": [1.0, 0.9, 1.1],
        "symmetric": [0.7, 0.6, 0.8],
        "quantised:int8": [2.0, 1.9, 2.1],
        "quantised:int2:sr": [4.0, 3.9, 4.1],
        "quantised:int4": None,  # its result was wrong
        "quantised:int8, one shot, 32 blocks": [0.1, 0.1, 0.1],
        "quantised:int8 in steps": [5.0, 4.9, 5.1],
        "quantised:int8 in one step": [0.5, 0.4, 0.6],
        "quantised:int8 in one step, no graph": [0.8, 0.7, 0.9],
    }
    speeds = bandwidths.of_all_reduce({**about, "ms": {"64 MiB": timed, "0.25 MiB": {"nccl": [1.0]}}})
    assert speeds == {
        "2 H200, in one kernel, 64 MiB": {"int8": 0.5, "int2:g32:sr": 0.25},
        "2 H200, in two steps, 64 MiB": {"int8": 0.2},
        "2 H200, in one step, 64 MiB": {"int8": 2.0},
    }
    text = bandwidths.to_text(bandwidths.TABLE_9, speeds)
    assert re.search(r"\| fcsd: 2 H200, in one kernel, 64 MiB +\| 0.50 +\| - .*\| 0.25 +\|\n", text)
    (small,) = bandwidths.of_all_reduce({**about, "ms": {"0.25 MiB": timed}}).keys() & {
        "2 H200, in one kernel, 256 KiB"
    }
    assert small
    sent = {"bf16": [3.0], "bf16, wire": [2.0], "int4:g32, fused": [1.5], "int4:g32, wire": [0.5], "int8, steps": [9.0]}
    assert bandwidths.of_exchange({**about, "ms": {"any expert": {"NCCL": sent}}}) == {
        "2 H200, any expert, NCCL": {"int4:g32": 2.0},
        "2 H200, any expert, NCCL, the exchange alone": {"int4:g32": 4.0},
    }


def test_the_picture_of_the_stored_study(stored: dict[str, Any], tmp_path: Path) -> None:
    tables.draw(stored, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
