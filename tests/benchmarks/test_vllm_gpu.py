"""``vllm_gpu.sh`` leaves what its parts have found, and none of their processes, when it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

# In place of vLLM: a part that finds one row, starts a process of its own as an engine does, and does not end.
PART = """
import os, subprocess, sys, time
sys.path.insert(0, "benchmarks/vllm")
from vllm_report import begin, report
report(dict(part=1), lambda: dict(right=True))
begin(dict(part=2))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["PROCESSES"], "a") as file:
    print(os.getpid(), child.pid, file=file)
time.sleep(600)
"""


def test_a_run_that_is_stopped_leaves_its_rows_and_no_process(repo: Path, tmp_path: Path) -> None:
    tools, carried, work = tmp_path / "bin", tmp_path / "carried", tmp_path / "work"
    for folder in (tools, carried, work / "site"):
        folder.mkdir(parents=True)
    for archive in ("vllm.tar.xz", "packages.tar.xz"):
        (carried / archive).touch()
    (work / "site" / "complete").touch()
    (tmp_path / "part.py").write_text(PART)
    python, part = sys.executable, tmp_path / "part.py"
    (tools / "python3").write_text(
        f'#!/bin/sh\ncase $1 in *vllm_parity.py) exec "{python}" "{part}" ;; *) exec "{python}" "$@" ;; esac\n'
    )
    (tools / "python3").chmod(0o755)
    processes = tmp_path / "processes"
    env = os.environ | dict(
        PATH=f"{tools}:{os.environ['PATH']}", WORK=str(work), OUT=str(tmp_path / "out"), PROCESSES=str(processes)
    )
    stored = tmp_path / "out" / "tasks.json"
    command = ["bash", "benchmarks/carried/vllm_gpu.sh", "tasks", str(carried)]
    run = subprocess.Popen(command, cwd=repo, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 60
        while not processes.exists() or len(processes.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        before = json.loads(stored.read_text())  # while the parts run
        run.send_signal(signal.SIGTERM)
        shown, _ = run.communicate(timeout=60)
    finally:
        run.terminate()  # which ends its parts, too, if the test has failed
        run.wait(60)

    assert [len(part["rows"]) for part in before.values()] == [1, 1]
    after = json.loads(stored.read_text())
    assert [(len(part["rows"]), part["unfinished"]) for part in after.values()] == [(1, [{"part": 2}])] * 2
    assert run.returncode == 1 and 'NOT ENDED {"part": 2}' in shown
    assert (tmp_path / "out" / "tasks-logs.tar.gz").exists()
    assert not [process for process in processes.read_text().split() if alive(process)]


def alive(process: str) -> bool:
    try:
        return "\nState:\tZ" not in Path("/proc", process, "status").read_text()
    except FileNotFoundError:
        return False
