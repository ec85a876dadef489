"""The page of real models holds the stored runs, and a case becomes a recipe that is taken."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
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


def real_model(repo: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this environment, from another folder."""
    env = {**os.environ, "FCSD_VENV": sys.prefix}
    return subprocess.run(
        [str(repo / "scripts/real_model.sh"), *arguments], cwd=cwd, env=env, capture_output=True, text=True
    )


def test_minutes_that_are_no_number_print_the_usage(repo: Path, tmp_path: Path) -> None:
    done = real_model(repo, tmp_path, "soon")
    assert done.returncode == 2 and "Usage: scripts/real_model.sh [MINUTES] [OUT]" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_real_model_is_healed_from_its_package(repo: Path, tmp_path: Path) -> None:
    """It downloads 98 MB and takes minutes. A second call repeats nothing and says the same."""
    done = real_model(repo, tmp_path, "1", "out")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    untrained, healed = map(float, re.findall(r"([\d.]+) (?:untrained|after)", last))
    assert healed < untrained
    assert (tmp_path / "out/healed/model.safetensors").is_file()
    assert real_model(repo, tmp_path, "1", "out").stdout.splitlines()[-1] == last
