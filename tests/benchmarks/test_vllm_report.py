"""``benchmarks.vllm report`` says what each part of a run found, and why a part failed."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGUN = dict(case="tiny", role="original", dtype="float32", mode="eager", ranks=1, experts=False)
FAILURE = """\
(EngineCore pid=7) ERROR 11-22 02:46:00 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 02:46:00 [core.py:9]   File "/tmp/site/vllm/v1/engine/core.py", line 9, in start
(EngineCore pid=7) ERROR 11-22 02:46:00 [core.py:9] RuntimeError: no kernel for this GPU
"""


def report(folder: Path, **logs: tuple[str, str]) -> tuple[int, str]:
    """Run the script on logs, each a text and an exit status. Returns its own exit status and what it prints."""
    (folder / "logs").mkdir()
    for name, (text, status) in logs.items():
        (folder / "logs" / f"{name}.log").write_text(text)
        (folder / "logs" / f"{name}.rc").write_text(status)
    command = [sys.executable, "-m", "benchmarks.vllm", "report", str(folder / "logs"), str(folder / "out" / "one")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def log(row: dict, **found: object) -> str:
    return f"START {json.dumps(row)}\nROW {json.dumps(row | found)}\n"


def test_right_rows_are_printed_and_stored(tmp_path):
    converted = BEGUN | dict(role="converted")
    text = log(BEGUN, right=True, largest=3e-6, runner="v2") + log(converted, right=True, largest=4e-6, runner="v2")
    status, shown = report(tmp_path, eager=(text, "0"))

    assert status == 0, shown
    assert "eager: ended with 0, 2 rows" in shown
    assert "right case=tiny role=original dtype=float32" in shown
    assert "right role=converted largest=4e-06" in shown  # the rest is as in the line before
    stored = json.loads((tmp_path / "out" / "one.json").read_text())["eager"]
    assert [row["largest"] for row in stored["rows"]] == [3e-6, 4e-6]
    with tarfile.open(tmp_path / "out" / "one-logs.tar.gz") as logs:
        assert logs.getnames() == ["eager.log"]


def test_a_failed_part_is_named_with_its_reason(tmp_path):
    text = f"START {json.dumps(BEGUN)}\n{FAILURE}"
    status, shown = report(tmp_path, eager=(text, "124"), fine=(log(BEGUN, right=True), "0"))

    assert status == 1
    assert "eager: stopped at its time limit, 0 rows" in shown
    assert f"NOT ENDED {json.dumps(BEGUN)}" in shown
    assert "vllm/v1/engine/core.py, line 9, in start\nRuntimeError: no kernel for this GPU" in shown
    assert "right case=tiny" in shown  # the other part is reported as well


def test_wrong_rows_and_other_runners_fail(tmp_path):
    converted = BEGUN | dict(role="converted")
    status, shown = report(tmp_path, wrong=(log(BEGUN, right=False), "0"))
    assert status == 1 and "WRONG case=tiny" in shown

    other = tmp_path / "other"
    other.mkdir()
    text = log(BEGUN, right=True, runner="v2") + log(converted, right=True, runner="v1")
    status, shown = report(other, eager=(text, "0"))
    assert status == 1 and "NOT THE SAME MODEL RUNNER" in shown and "v1, v2" in shown
