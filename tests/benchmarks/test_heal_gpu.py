"""``heal_gpu.sh call``: the run starts once, when all parts are there, and every call hands back what was found."""

import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

# In place of Python: it says what it was asked for, and leaves what the commands of fcsd would leave.
PYTHON = """#!/bin/sh
echo "$*" >> "$ASKED"
case "$*" in
*torch.cuda*) echo 2 ;;
*"studies.real read_gguf"*) mkdir -p "$5" ;;
*"fcsd write"*)
    for text in own doc; do mkdir -p "$WORK/texts/$text"; echo {} > "$WORK/texts/$text/write.json"; done ;;
*"studies.real heal"*)
    mkdir -p "$WORK/healed/a/run/final" "$WORK/healed/a/student"
    echo '{"step": 7}' > "$WORK/healed/a/run/metrics.jsonl"
    cd "$WORK/healed"
    touch results.jsonl a/run/final/model.safetensors a/student/config.json ;;
esac
"""


def test_a_run_of_carried_parts(repo: Path, tmp_path: Path) -> None:
    tools, parts, work, out = (tmp_path / name for name in ("bin", "parts", "work", "out"))
    for number in "123":
        (parts / number).mkdir(parents=True)
    for folder in (tools, out, tmp_path / "texts", tmp_path / "mirror"):
        folder.mkdir()
    (tools / "python3").write_text(PYTHON)
    (tools / "python3").chmod(0o755)
    (parts / "1/weights.0").write_text("GG")
    (parts / "2/weights.1").write_text("UF")
    (parts / "3/cases.jsonl").touch()
    for name, packed in (("texts", parts / "3/texts.tar"), ("mirror", parts / "2/mirror.tar.xz")):
        with tarfile.open(packed, "w:xz" if packed.suffix == ".xz" else "w") as archive:
            archive.add(tmp_path / name, name)
    asked = tmp_path / "asked"
    given = dict(
        PATH=f"{tools}:{os.environ['PATH']}",
        WORK=str(work),
        OUT=str(out),
        ASKED=str(asked),
        WAIT="0.1",
        LIMIT="9",
        AT_ONCE="3",
    )

    def call(*words: str) -> str:
        command = ["bash", "benchmarks/carried/heal_gpu.sh", "call", *words]
        return subprocess.run(
            command, cwd=repo, env=os.environ | given, check=True, capture_output=True, text=True
        ).stdout

    for number in "12":
        call(str(parts / number))
        assert not asked.exists(), "a part is missing"
    call(str(parts / "3"))
    until = time.monotonic() + 60
    while "ended" not in (told := call()) and time.monotonic() < until:
        time.sleep(0.1)
    assert told.splitlines()[-1] == 'a/run/metrics.jsonl: {"step": 7}', told
    assert (work / "model.gguf").read_text() == "GGUF"
    words = asked.read_text().splitlines()
    first, second = (line for line in words if "studies.real heal" in line)
    assert words[-1] == second and second == first.replace("--at-once 3", "--at-once 1"), "what failed runs alone"
    assert "--gpus 2 --at-once 3" in first and "--limit 9" in first
    assert len([line for line in words if "fcsd write" in line]) == 2, "it starts once"
    with tarfile.open(out / "found.tar.gz") as archive:
        names = archive.getnames()
    assert {"found/own.json", "found/run.log", "healed/a/run/metrics.jsonl", "healed/results.jsonl"} <= {*names}
    assert not [name for name in names if name.endswith("safetensors") or name.endswith(("student", "final"))], (
        "no weights"
    )
