"""The alpha-beta model: HierMoE's own figures, lines through points, and what overlap leaves exposed."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fcsd.errors import ConfigError
from fcsd.parallel.cost import (
    Collective,
    Line,
    Links,
    Rows,
    expected_groups,
    fit,
    kernel_seconds,
    transfer_seconds,
    worst_error,
)
from fcsd.parallel.machine import read_machine


@dataclass(frozen=True)
class Level:
    """A level of HierMoE's hierarchy.

    Attributes:
        groups: groups of ranks at this level, the paper's U[i]; U[0] is 1.
        inter: an all-to-all between the groups of this level inside of a group of the level above.
        intra: an all-to-all inside of a group of this level.
    """

    groups: int
    inter: Line
    intra: Line


# HierMoE §V: ms and ms per byte on four nodes of eight A6000; inter and intra of the levels 1 to 3, and the flat one.
FLAT = Line(0.722e-3, 5.70e-10)
LEVELS = [
    Level(4, Line(0.497e-3, 5.29e-10), Line(0.571e-3, 1.27e-10)),
    Level(8, Line(0.301e-3, 1.17e-10), Line(0.114e-3, 2.63e-11)),
    Level(16, Line(0.149e-3, 2.06e-11), Line(0.204e-3, 1.64e-11)),
]


def paper_seconds(rows: Rows, flat: Line, levels: Sequence[Level]) -> list[float]:
    """HierMoE's predictions: without deduplication (eq. 1), and with it over d = 1, 2, ... levels (eq. 3 to 5).

    As in the paper, a rank's message counts the rows that stay on the rank. ``rows.ranks`` is the paper's G, and
    ``flat`` an all-to-all between all ranks.
    """
    groups = [*(level.groups for level in levels), rows.ranks]
    each = [rows.top_k, *(expected_groups(rows.experts, rows.top_k, count) for count in groups)]
    plain, *sizes = [rows.tokens * count * rows.wire for count in each]
    times = [flat.seconds(plain), flat.seconds(sizes[-1])]
    passed = 0.0
    for level, size in zip(levels, sizes, strict=False):
        passed += level.inter.seconds(size)
        times.append(passed + level.intra.seconds(sizes[-1]))
    return times


@pytest.mark.parametrize(
    ("rows", "speed_ups"),
    [
        (Rows(1024, 8, 128, 32, 2048), [1.08, 1.52, 1.60, 1.54]),  # Qwen3-30B-A3B
        (Rows(1024, 8, 256, 32, 3584), [1.10, 1.56, 1.64, 1.58]),  # DeepSeek-V3, half as wide
    ],
)
def test_the_constants_of_the_paper_choose_three_levels(rows: Rows, speed_ups: list[float]) -> None:
    times = paper_seconds(rows, FLAT, LEVELS)
    assert [times[0] / seconds for seconds in times[1:]] == pytest.approx(speed_ups, abs=0.006)
    assert min(times) == times[3], "eq. 6"


def test_groups_are_counted_as_in_all_possible_choices() -> None:
    chosen = list(itertools.combinations(range(8), 3))
    counted = sum(len({expert // 2 for expert in experts}) for experts in chosen) / len(chosen)
    assert expected_groups(8, 3, 4) == pytest.approx(counted)


def test_a_line_is_found_again_through_noise() -> None:
    noise = random.Random(0)
    line = Line(80e-6, 1 / 300e9)
    sizes = [2.0**power for power in range(12, 30)]
    points = [(size, line.seconds(size) * noise.uniform(0.97, 1.03)) for size in sizes]
    found = fit(points)
    assert found.alpha == pytest.approx(line.alpha, rel=0.03) and found.beta == pytest.approx(line.beta, rel=0.03)
    assert worst_error(found, points) < 0.05
    assert fit([(1e6, 1e-3), (2e6, 1.9e-3), (4e6, 4.4e-3)]).alpha >= 0


LINKS = Links(per_node=2, near=Line(1e-5, 1 / 300e9), far=Line(2e-5, 1 / 12e9), hidden_cost=0.25, copy=4e12, codec=0.5)


def test_bytes_of_each_level_of_deduplication() -> None:
    rows = Rows(tokens=1000, top_k=6, experts=64, ranks=4, width=2048)
    far, near = LINKS.far, LINKS.near
    assert far is not None
    row = 4096
    assert transfer_seconds(rows, LINKS, "off") == pytest.approx(far.seconds(1000 * 6 / 4 * 2 * row))
    each = expected_groups(64, 6, 4)
    assert transfer_seconds(rows, LINKS, "rank") == pytest.approx(far.seconds(1000 * each / 4 * 2 * row))
    between = far.seconds(1000 * expected_groups(64, 6, 2) / 2 * row)
    assert transfer_seconds(rows, LINKS, "node") == pytest.approx(between + near.seconds(1000 * each / 2 * row))
    one_node = Links(4, near, None, 0.25, 4e12, 0.5)
    assert transfer_seconds(rows, one_node, "off") == pytest.approx(near.seconds(1000 * 6 / 4 * 3 * row))
    assert transfer_seconds(rows, one_node, "node") == transfer_seconds(rows, one_node, "rank")


def test_a_shorter_wire_pays_only_where_it_was_exposed() -> None:
    plain, coded = (Rows(16384, 6, 64, 4, 2048, bits) for bits in (16.0, 8.25))
    assert kernel_seconds(plain, LINKS, "off") == 0 < kernel_seconds(coded, LINKS, "off")

    def exposed(rows: Rows, cover: float) -> float:
        return Collective(transfer_seconds(rows, LINKS, "off"), cover, kernel_seconds(rows, LINKS, "off")).exposed(0.0)

    assert exposed(coded, 0.0) < exposed(plain, 0.0)
    assert exposed(plain, 1.0) == 0 < exposed(coded, 1.0)
    assert Collective(2.0, 1.5).exposed(0.2) == pytest.approx(0.5 + 0.3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a machine file: it is not JSON"),
        ("[]", "is not a machine file: Input should be an object"),
        ('{"gpus_per_node": 4}', "'near' is missing"),
        ('{"gpu_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1}}', "did you mean 'gpus_per_node'?"),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gbps": 1}}', "'near.gbps'; did you mean 'near.gb_per_s'?"),
        (
            '{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": "1 GB"}}',
            "near.gb_per_s: should be a valid number",
        ),
        ('{"gpus_per_node": 0, "near": {"latency_us": 1, "gb_per_s": 1}}', "gpus_per_node: should be greater than 0"),
        ('{"gpus_per_node": 1, "near": {"latency_us": 1, "gb_per_s": 1}}', "file: a machine of one GPU has no link"),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 0}}', "near.gb_per_s: should be greater than 0"),
        (
            '{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1}, "fra": {}}',
            "unknown key 'fra'; did you mean 'far'?",
        ),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1}, "fixed_us": {"rnak": 1}}', "'rank'"),
        # These would make a step infinite, and ratios of steps nan.
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1e-320}}', "near.gb_per_s: should be greater"),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1e308, "gb_per_s": 1}}', "near.latency_us: should be less"),
        (
            '{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1}, "peak_tflops": 1e-320}',
            "peak_tflops: should be greater",
        ),
    ],
)
def test_a_damaged_machine_file_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"machine\.json") as caught:
        read_machine(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_machine_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: no such file"):
        read_machine(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(tmp_path)


def test_a_machine_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"gpus_per_node": 8, "near": {"latency_us": 80, "gb_per_s": 360}}))
    links = read_machine(path).links
    assert links.near.seconds(360e6) == pytest.approx(80e-6 + 1e-3) and links.far is None and links.per_node == 8
    assert links.speed == 1 and read_machine(path).assumed is None, "an H200 if nothing else is said"
    other = {"gpus_per_node": 8, "near": {"latency_us": 80, "gb_per_s": 240}, "gpu": "NVIDIA A100"}
    path.write_text(json.dumps(other))
    assert "no peak_tflops of NVIDIA A100" in (read_machine(path).assumed or "")
    path.write_text(json.dumps({**other, "peak_tflops": 312}))
    assert read_machine(path).links.speed == pytest.approx(312 / 989) and read_machine(path).assumed is None
