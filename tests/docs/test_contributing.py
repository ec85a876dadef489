"""Adding an architecture takes the steps that docs/adding_an_architecture.md says, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import test_rotary

from fcsd.models import archs
from fcsd.models.arch import Arch
from fcsd.models.archs import ARCHS

# The line below which each of the two files of the page gets a new entry.
TABLES = {"fcsd/models/archs.py": "_ROWS = (", "tests/tiny.py": "CONFIGS: dict[str, tuple[str, dict]] = {"}


@pytest.fixture
def page(repo: Path) -> str:
    return (repo / "docs/adding_an_architecture.md").read_text()


def python_blocks(page: str) -> list[str]:
    """The easy row, its tiny config, and the hard row."""
    return [block.strip() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def test_the_steps_add_the_easy_family(page: str, repo: Path, tmp_path: Path) -> None:
    """In a copy of the repository; the commands are those of the steps."""
    steps = page.split("## An easy family")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d\. ", steps, re.MULTILINE)) == 4
    ((marked, chosen),) = re.findall(r'`scripts/test\.sh tests -m "(.*?)" -k "(.*?)"`', steps)
    (script,) = re.findall(r"`python (scripts/\w+\.py)`", steps)
    family = eval(python_blocks(page)[0], vars(archs)).model_type
    assert family in chosen.split()

    for name in ("fcsd", "tests", "scripts", "docs", "recipes", "README.md", "CONTRIBUTING.md", "pyproject.toml"):
        copy = shutil.copytree if (repo / name).is_dir() else shutil.copy
        copy(repo / name, tmp_path / name)
    for name in ("assets", "benchmarks", "studies"):
        (tmp_path / name).symlink_to(repo / name)
    if family not in ARCHS:
        for (name, line), entry in zip(TABLES.items(), python_blocks(page), strict=False):
            before, after = (tmp_path / name).read_text().split(f"\n{line}\n")
            (tmp_path / name).write_text(f"{before}\n{line}\n    {entry},\n{after}")

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        return done.stdout

    # The files that have cases of a family: to collect all others, too, takes most of the command's time.
    named = re.compile(r"\b(CONFIGS|ARCHS|representatives|names_exist)\b")
    folders = ("models", "engine", "kernels", "parallel", "plan", "serve", "distill/step")
    files = (file for name in folders for file in (tmp_path / "tests" / name).rglob("test_*.py"))
    where = sorted(str(file) for file in files if named.search(file.read_text()))
    passed = re.search(
        r"(\d+) passed", run("-m", "pytest", "-q", "-p", "no:cacheprovider", *where, "-m", marked, "-k", chosen)
    )
    assert passed is not None and int(passed[1]) > 40
    run(script)
    assert f"`{family}`" in (tmp_path / "docs/reference/architectures.md").read_text()


def test_the_hard_row_is_that_of_the_table_and_every_field_is_explained(page: str) -> None:
    row = eval(python_blocks(page)[2], vars(archs))
    assert row == ARCHS[row.model_type]
    assert [field.name for field in fields(Arch) if f"`{field.name}`" not in page] == ["model_type"]


def test_a_forgotten_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a default row the hard family does not pass: its kernel would rotate by other angles."""
    monkeypatch.setitem(ARCHS, "gpt_oss", archs._row("gpt_oss", "GptOss"))  # pyright: ignore
    with pytest.raises(AssertionError):
        test_rotary.test_a_model_with_fused_rotations_computes_the_same_and_becomes_itself_again("gpt_oss")
