"""``quantised_gpu.sh call``: it waits for all parts, puts the weights together, and measures."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

# In place of Python: it says what it was asked for, and leaves what the study would leave.
PYTHON = """#!/bin/sh
echo "$*" >> "$ASKED"
case "$*" in
*--table*) echo "a table" ;;
*"studies.real quantised"*) echo '{"form": "original"}' > "$OUT/results.jsonl" ;;
esac
"""


def test_a_run_of_carried_parts(repo: Path, tmp_path: Path) -> None:
    tools, parts, work, out = (tmp_path / name for name in ("bin", "parts", "work", "out"))
    for number, text in (("1", "G"), ("2", "GU"), ("3", "F")):
        (parts / number).mkdir(parents=True)
        (parts / number / f"weights.{int(number) - 1}").write_text(text)
    (parts / "3/wheels").mkdir()
    (parts / "3/wheels/a.whl").touch()
    tools.mkdir()
    (tools / "python3").write_text(PYTHON)
    (tools / "python3").chmod(0o755)
    asked = tmp_path / "asked"
    given = dict(PATH=f"{tools}:{os.environ['PATH']}", WORK=str(work), OUT=str(out), ASKED=str(asked), TOKENS="5e5")

    def call(*names: str) -> str:
        command = ["bash", "benchmarks/carried/quantised_gpu.sh", "call", *(str(parts / name) for name in names)]
        return subprocess.run(
            command, cwd=repo, env=os.environ | given, check=True, capture_output=True, text=True
        ).stdout

    for number in "12":
        assert "waits for another part" in call(number)
        assert not asked.exists()
    *_, table, ended = call("3").splitlines()
    assert table == "a table" and ended.endswith("s: ended")
    assert (work / "model.gguf").read_text() == "GGUF"
    assert (out / "table.md").read_text() == "a table\n"
    words = asked.read_text().splitlines()
    order = ("pip install", "studies.real read_gguf", "studies.real texts", "fcsd write", "studies.real quantised")
    assert [line for line in words if not any(what in line for what in order)] == []
    assert [sum(what in line for line in words) for what in order] == [1, 1, 1, 1, 2]
    study = next(line for line in words if "studies.real quantised" in line)
    assert "--tokens 5e5" in study and f"own={work}/own" in study
    assert 500 < int(study.split("--seconds ")[1].split()[0]) <= 540 and "--questions" not in study

    (parts / "4").mkdir()
    (parts / "4/questions.json.gz").touch()
    asked.unlink()
    call("3", "4")
    assert any(f"--questions {work}/in/questions.json.gz" in line for line in asked.read_text().splitlines())
