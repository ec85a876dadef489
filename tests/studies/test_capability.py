"""The capability study: its scores follow from the answers, and its pages from the stored lines."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from studies.capability import report
from studies.capability.results import read_lines, unpacked
from studies.capability.rows import SCRATCH, chosen_half
from studies.capability.scores import fit, scores_of, tokens_to
from studies.capability.wirings_report import scratch

from fcsd.eval.suite import SUITES
from fcsd.models.selection import select_layers

pytestmark = pytest.mark.lab


def line_of(method: str, quality: float, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A stored line of a model that knows each of 40 answers with a probability; answers follow from the name."""
    draw = random.Random(f"{method} {seed}")
    results = []
    for benchmark in SUITES["strict"]:
        level = (benchmark.chance or 0) / 100
        items = "".join(str(int(draw.random() < level + quality * (1 - level))) for _ in range(40))
        own = {"column": benchmark.column, "metric": "acc", "value": items.count("1") / 40, "stderr": 0.05, "n": 40}
        results.append(own | {"chance": benchmark.chance, "items": items, "settings_sha256": "s", "data_sha256": "d"})
    texts = [[10 * (2 - quality) + draw.random(), 10] for _ in range(8)]
    loss = {"column": "Held-out loss", "metric": "nll_per_token", "value": 1.0, "stderr": 0.1, "n": 80, "chance": None}
    results.append(loss | {"items": texts, "settings_sha256": "s", "data_sha256": "d"})
    run = {"method": method, "text": "", "share": 0.0, "layers": "all", "early_stop": "", "seed": seed, "model": ""}
    line = {"name": f"{method}-{seed}", "run": run, "results": results, "teacher_tokens": 1_000_000_000}
    return line | {"limit": None, "device": "a GPU", "versions": {"torch": "2"}} | changes


def test_lines_keep_the_answers(tmp_path: Path) -> None:
    line, path = line_of("teacher", 0.5), tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'device': 'another'})}\n")
    found = read_lines([path])
    assert list(found) == [line["name"]] and found[line["name"]]["device"] == "another"
    first = line["results"][0]
    assert unpacked(first)["items"] == [float(digit) for digit in first["items"]]


def test_scores_are_paired_and_corrected_for_chance() -> None:
    teacher, untrained = line_of("teacher", 1.0), line_of("untrained", 0.0)
    same = scores_of([teacher], teacher, untrained)
    assert same.below["Avg"][0] == 0 and same.above_chance[0] == same.of_teacher[0] == 1
    floor = scores_of([untrained], teacher, untrained)
    assert floor.won_back is not None and floor.won_back[0] == 0 and floor.loss_won_back == (0, 0)
    assert abs(floor.above_chance[0]) < 0.1 < floor.of_teacher[0]  # guessing is worth nothing above chance
    seeds = [line_of("KL", 0.8, seed) for seed in range(3)]
    three, one = scores_of(seeds, teacher, untrained), scores_of(seeds[:1], teacher, untrained)
    assert three.seeds == 3 and three.above_chance[0] == pytest.approx(0.8, abs=0.08)
    means = [scores_of([line], teacher, untrained).below["Avg"][0] for line in seeds]
    assert three.below["Avg"][0] == pytest.approx(sum(means) / 3)
    assert 0 < three.above_chance[1] < one.above_chance[1]
    other = json.loads(json.dumps(untrained))
    other["results"][0]["data_sha256"] = "x"
    with pytest.raises(ValueError, match="different questions"):
        scores_of([other], teacher, untrained)


def test_a_power_law_is_found_again() -> None:
    points = [(10.0**n, (1 - 0.5 * 10 ** (-0.3 * (n - 5)), 0.01)) for n in range(5, 9)]
    found = fit(points)
    value, low, high = found.at(1e10)
    assert found.b == pytest.approx(-0.3) and value == pytest.approx(1 - 0.5 * 10**-1.5)
    assert low < value < high <= 1
    assert tokens_to(0.9, [(1e6, 0.8), (1e8, 1.0)]) == pytest.approx(1e7)
    assert tokens_to(0.9, [(1e6, 0.95)]) == 1e6 and tokens_to(0.99, [(1e6, 0.8), (1e8, 0.98)]) is None


def test_losses_from_scratch_are_compared_within_a_seed() -> None:
    lines = {f"{kind}-all": line_of(kind, 0.5) for kind in ("teacher", "untrained")}
    for wiring, more in (("standard", 0.0), ("farskip", 0.02)):
        for seed in range(3):
            line = line_of(f"from scratch, {wiring}", 0.5, seed, final_loss=2 + 0.01 * seed + more)
            line["run"] |= {"text": "same", "share": SCRATCH}
            lines[line["name"]] = line | {"parameters": 5_000_000, "metrics": {"held_out_sft": 2.5}}
    rows = scratch(report.Models(lines)).splitlines()
    (moe,) = [row for row in rows if row.startswith("| MoE ") and "farskip" in row]
    figures = ["2.0300 ± 0.0058", "+0.0200 ± 0.0000", "2.5000 ± 0.0000", "3"]
    assert [cell.strip() for cell in moe.split("|")[4:8]] == figures


def test_the_page_refuses_trials_and_leaves_out_what_is_not_stored(tmp_path: Path) -> None:
    few = {f"{kind}-all": line_of(kind, 0.5) for kind in ("teacher", "untrained")}
    text = report.page(few, tmp_path / "none.png")
    assert "\n## " not in text and not (tmp_path / "none.png").exists()
    with pytest.raises(ValueError, match="trials"):
        report.page(few | {"x": line_of("KL", 0.5, limit=5)}, tmp_path / "none.png")
    with pytest.raises(ValueError, match="different teachers"):
        report.page(few | {"x": line_of("KL", 0.5, teacher_tokens=7)}, tmp_path / "none.png")


@pytest.mark.parametrize("suffix", ["", "_llama", "_qwen3_moe", "_moe_64"])
def test_the_stored_page_is_that_of_the_stored_results(suffix: str, repo: Path, tmp_path: Path) -> None:
    text = report.page(read_lines([repo / f"benchmarks/results/capability{suffix}.jsonl"]), tmp_path / "capability.png")
    assert text == (repo / f"studies/capability/CAPABILITY{suffix.upper()}.md").read_text(encoding="utf-8")
    assert (tmp_path / "capability.png").exists() == (suffix == "")


def test_the_search_chose_half_of_the_layers() -> None:
    assert len(set(select_layers(chosen_half(), 10))) == 5
