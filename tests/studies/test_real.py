"""The page of real models holds the stored runs, and a case becomes a recipe that is taken."""

from pathlib import Path

from studies.real import page
from studies.real.heal import recipe_of

from fcsd.config import Recipe


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    text, raw = (repo / page.PAGE).read_text(), page.read(repo)
    assert page.filled(text, raw) == text, "run python -m studies.real.page"
    assert len(page.runs(raw).splitlines()) == 2 + sum("kl" in run for file in raw for run in file["runs"])


def test_every_stored_case_is_a_recipe(repo: Path, tmp_path: Path) -> None:
    texts = {"own": tmp_path / "own", "foreign": tmp_path / "foreign"}
    for case in (case for file in page.read(repo) for case in file["runs"]):
        read = Recipe.model_validate(recipe_of(case, tmp_path / "student", tmp_path, texts))
        assert read.optim.lr == case["lr"] and read.train.steps == case["steps"]
        assert len(read.data.sources) == len(case["text"].split("+"))
