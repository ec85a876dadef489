"""The page of real models holds the stored runs, and a case becomes a recipe that is taken."""

import json
from pathlib import Path
from statistics import median

from studies.real import page
from studies.real.heal import recipe_of

from fcsd.config import Recipe


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    text, raw = (repo / page.PAGE).read_text(), page.read(repo)
    assert page.filled(text, raw) == text, "run python -m studies.real.page"
    assert len(page.runs(raw).splitlines()) == 2 + sum("kl" in run for file in raw for run in file["runs"])


def test_the_figures_of_single_layers_are_those_of_the_raw_file(repo: Path) -> None:
    text = (repo / page.PAGE).read_text()
    raw = json.loads((repo / "benchmarks/results/real_smollm2_layers_cpu.json").read_text())
    ladder, farskip = (raw[wiring]["alone"] for wiring in ("ladder", "farskip"))
    rest = max(cost for layer, cost in enumerate(ladder) if layer not in (0, 1, 12, 29))
    assert f"Ladder: {ladder[0]:.2f} for layer 0, {ladder[1]:.2f} for layer 1, {ladder[12]:.2f} for layer 12" in text
    assert f"{ladder[29]:.2f} for layer 29, at most {rest:.2f} for any\nother, and {median(ladder):.2f} in" in text
    assert f"Farskip: {farskip[0]:.2f}, {farskip[1]:.2f}, then at most {max(farskip[2:]):.2f}" in text
    two, three = (raw["ladder"]["standard_layers"][layers] for layers in ("0,1", "0,1,12"))
    assert f"{two:.2f} on this text" in text and f"standard as well {three:.2f}" in text


def test_every_stored_case_is_a_recipe(repo: Path, tmp_path: Path) -> None:
    texts = {"own": tmp_path / "own", "foreign": tmp_path / "foreign"}
    for case in (case for file in page.read(repo) for case in file["runs"]):
        read = Recipe.model_validate(recipe_of(case, tmp_path / "student", tmp_path, texts))
        assert read.optim.lr == case["lr"] and read.train.steps == case["steps"]
        assert len(read.data.sources) == len(case["text"].split("+"))
