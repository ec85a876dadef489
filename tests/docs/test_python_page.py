"""docs/python.md is true: its blocks run, in their order, as one script in one process, and print what it says."""

import re
from pathlib import Path

import ranks

import fcsd


def test_the_page_runs_as_printed(repo: Path, tmp_path: Path) -> None:
    page = (repo / "docs/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "assets").symlink_to(repo / "assets")
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = ranks.script(tmp_path / "page.py")
    assert done.returncode == 0, done.stderr
    assert "parity   bit-identical with the wiring off: first 10 of 10 layers" in done.stdout
    assert len(re.findall(r"^(rewired|final) within 1 points of teacher: ", done.stdout, re.MULTILINE)) == 2
    printed = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(printed) == 1
    assert done.stdout.endswith("".join(printed))
    assert sum(1 for line in (tmp_path / "runs/python/metrics.jsonl").open()) > 1


def test_the_page_names_every_function(repo: Path) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (repo / "docs/python.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == fcsd.__all__
