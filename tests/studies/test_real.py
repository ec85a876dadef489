"""The page of real models holds the stored runs, and a case becomes a recipe that is taken."""

import json
from pathlib import Path

from studies.real import page
from studies.real.heal import recipe_of

from fcsd.config import Recipe


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    text, raw = (repo / page.PAGE).read_text(), json.loads((repo / page.RAW).read_text())
    assert page.filled(text, raw) == text, "run python -m studies.real.page"
    assert len(page.table(raw["runs"]).splitlines()) == 2 + sum("kl" in run for run in raw["runs"])


def test_every_stored_case_is_a_recipe(repo: Path, tmp_path: Path) -> None:
    texts = {"own": tmp_path / "own", "foreign": tmp_path / "foreign"}
    for case in json.loads((repo / page.RAW).read_text())["runs"]:
        read = Recipe.model_validate(recipe_of(case, tmp_path / "student", tmp_path, texts))
        assert read.optim.lr == case["lr"] and read.train.steps == case["steps"]
        assert len(read.data.sources) == len(case["text"].split("+"))
