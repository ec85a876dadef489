"""``vllm_gpu.sh``: what a stopped run leaves, and two runs at the same time."""

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
from benchmarks.vllm.report import begin, report
report(dict(part=1), lambda: dict(right=True))
begin(dict(part=2, words=" ".join(sys.argv[6:])))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["PROCESSES"], "a") as file:
    print(os.getpid(), child.pid, file=file)
time.sleep(600)
"""

# In place of `fcsd bench serve`: it ends when two of them have begun, and says where its caches are.
SERVE = """
import os, sys, time
from pathlib import Path
begun = Path(os.environ["PROCESSES"])
begun.mkdir(exist_ok=True)
(begun / str(os.getpid())).touch()
until = time.monotonic() + 60
while len(list(begun.iterdir())) < 2 and time.monotonic() < until:
    time.sleep(0.02)
caches = {name: path for name, path in os.environ.items() if "CACHE" in name and path.startswith(os.environ["WORK"])}
print("BOTH", len(list(begun.iterdir())), *sorted(set(caches.values())), *sys.argv)
"""


def begin(repo: Path, folder: Path, command: str, name: str, part: str, **env: str) -> "subprocess.Popen[str]":
    """Start a command of the script, with what was unpacked before, and with ``part`` in place of a Python program."""
    tools, carried, work = folder / "bin", folder / "carried", folder / "work"
    if not tools.exists():
        for made in (tools, carried, work / "site"):
            made.mkdir(parents=True)
        for archive in ("vllm.tar.xz", "packages.tar.xz"):
            (carried / archive).touch()
        (work / "site" / "complete").touch()
        (folder / "part.py").write_text(part)
        (tools / "python3").write_text(
            f'#!/bin/sh\ncase "$*" in {name}*) exec "{sys.executable}" "{folder}/part.py" "$@" ;; '
            f'*) exec "{sys.executable}" "$@" ;; esac\n'
        )
        (tools / "python3").chmod(0o755)
    given = dict(PATH=f"{tools}:{os.environ['PATH']}", WORK=str(work), PROCESSES=str(folder / "processes")) | env
    words = ["bash", "benchmarks/carried/vllm_gpu.sh", command, str(carried)]
    return subprocess.Popen(
        words, cwd=repo, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_two_runs_on_different_gpus_share_what_was_unpacked_alone(repo: Path, tmp_path: Path) -> None:
    runs = [
        begin(repo, tmp_path, "serve", '"-m fcsd bench serve "', SERVE, CUDA_VISIBLE_DEVICES=gpus, OUT=str(out))
        for gpus, out in (("0,1", tmp_path / "a"), ("2,3", tmp_path / "b"))
    ]
    shown = [run.communicate(timeout=90)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], shown
    told = [next(line for line in text.splitlines() if line.startswith("BOTH 2 ")).split() for text in shown]
    assert not {word for word in told[0] if "cache" in word} & {word for word in told[1] if "cache" in word}
    for name, lane, words in (("a", "0-1", told[0]), ("b", "2-3", told[1])):
        assert (tmp_path / name / "serve.json").is_file() and f"{tmp_path}/work/cache-{lane}/vllm" in words
        assert f"{tmp_path}/{name}/serve" in words and 4 < float(words[words.index("--minutes") + 1]) < 5
        assert (tmp_path / "work" / f"logs-serve-{lane}" / "serve.log").is_file()


def test_a_run_that_is_stopped_leaves_its_rows_and_no_process(repo: Path, tmp_path: Path) -> None:
    processes, stored = tmp_path / "processes", tmp_path / "out" / "rows.json"
    plans = "a/float32/eager b/float32/eager/ep;c/float32/graph"
    run = begin(repo, tmp_path, "rows", '"-m benchmarks.vllm parity "', PART, OUT=str(tmp_path / "out"), PLANS=plans)
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
    parts = {name: (len(part["rows"]), part["unfinished"]) for name, part in after.items()}
    left = [[dict(part=2, words=f"--tp 2 {part}")] for part in plans.split(";")]
    assert parts == {"part-0": (1, left[0]), "part-1": (1, left[1])}
    assert run.returncode == 1 and 'NOT ENDED {"part": 2, "words": "--tp 2 c/float32/graph"}' in shown
    assert (tmp_path / "out" / "rows-logs.tar.gz").exists()
    assert not [process for process in processes.read_text().split() if alive(process)]


def alive(process: str) -> bool:
    try:
        return "\nState:\tZ" not in Path("/proc", process, "status").read_text()
    except FileNotFoundError:
        return False
