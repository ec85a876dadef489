"""docs/python.md is true: its blocks run, in their order, as one script in one process, and print what it says."""

import re
import subprocess
from pathlib import Path

import pytest
import ranks

import fcsd


def blocks(repo: Path, language: str) -> list[str]:
    """The blocks of a language in the page."""
    return re.findall(rf"```{language}\n(.*?)```", (repo / "docs/python.md").read_text(), re.DOTALL)


def run(repo: Path, folder: Path, script: str) -> "subprocess.CompletedProcess[str]":
    (folder / "assets").symlink_to(repo / "assets")
    (folder / "page.py").write_text(script)
    done = ranks.script(folder / "page.py")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.nightly
def test_the_page_runs_as_printed(repo: Path, tmp_path: Path) -> None:
    done = run(repo, tmp_path, "\n".join(blocks(repo, "python")))
    assert "parity   bit-identical with the wiring off: first 10 of 10 layers" in done.stdout
    assert len(re.findall(r"^(rewired|final) within 1 points of teacher: ", done.stdout, re.MULTILINE)) == 2
    assert done.stdout.endswith("".join(blocks(repo, "text")))
    assert sum(1 for line in (tmp_path / "runs/python/metrics.jsonl").open()) > 1


def test_a_model_in_memory_is_rewired_as_printed(repo: Path, tmp_path: Path) -> None:
    _, script = blocks(repo, "python")
    (printed,) = blocks(repo, "text")
    assert run(repo, tmp_path, script).stdout == printed


def test_the_page_names_every_function(repo: Path) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (repo / "docs/python.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == fcsd.__all__
    assert set(re.findall(r"\bfcsd\.([a-z]\w+)\(", "".join(blocks(repo, "python")))) <= {*fcsd.__all__}
