"""The shell scripts of benchmarks/ give commands that fcsd and the programs take."""

import os
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.train.step.__main__ import Options, app
from benchmarks.train.step.workload import Workload

from fcsd.config import load_recipe

pytestmark = pytest.mark.lab


def step_asked(words: list[str]) -> tuple[dict[str, Any], Workload]:
    """The values of the options of ``benchmarks.train.step``, and the workload that they ask for."""
    given = typer.main.get_command(app).make_context("step", words).params
    asked = Options(**{field.name: given[field.name] for field in fields(Options)})
    return given, asked.workload(given["shape"])


def test_the_script_of_all_cases_gives_commands_that_are_taken(tmp_path):
    stand_in = tmp_path / "python3"
    stand_in.write_text('#!/bin/sh\nshift 2\necho "$@"\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    script = Path(__file__).parents[2] / "benchmarks/train/overlap.sh"
    said = subprocess.run([script, "4"], env=environment, capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        given, load = step_asked(line.split())
        assert (given["gpus"], given["trace"]) == (4, "slow_link" not in line) and load.overlapped[-1:] != ()
    assert len(said.splitlines()) == 7


def test_the_script_of_wires_gives_commands_that_are_taken(tmp_path):
    stand_in = tmp_path / "python3"
    stand_in.write_text(
        '#!/bin/sh\necho "$@"\n[ "$3" = distill ] || exit 0\ncp "$4" "$OUT"\n'
        'run=$(sed -n "s/^output_dir: //p" "$4")\nmkdir -p "$run"\ntouch "$run/metrics.jsonl"\n'
    )
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run([root / "benchmarks/comm/quantised.sh", "4"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = []
    for line in done.stdout.splitlines():
        words = line.split()
        if words[:2] == ["-m", "benchmarks.train.step"]:
            _, load = step_asked(words[2:])
            assert {name.partition("+")[2] for name in load.changed} >= {"rank", "int8", "rank+int8"}
        elif words[:2] == ["-m", "benchmarks.infer"]:
            assert "quantised:int2:sr" in words[words.index("--reduce") + 1].split(",")
        elif "benchmarks." in line:
            (module,) = [word for word in words if word.startswith("benchmarks.")]
            modules.append(module.removeprefix("benchmarks."))
            path = root / module.replace(".", "/")
            text = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            options = [word for word in words[words.index(module) :] if word.startswith("--")]
            assert all(f'"{option}"' in text for option in options), line
    assert modules == [
        "comm.transports",
        "comm.all_reduce",
        "random_checkpoint",
        "kernels.formats",
    ]
    for link in ("nvlink", "slow"):
        assert (tmp_path / f"swaps_{link}.jsonl").exists()
        recipe = load_recipe(str(tmp_path / f"{link}.yaml")).recipe
        assert recipe.parallel.placement.every == 10 and recipe.objective.kl == 0
    asked = subprocess.run(
        [root / "benchmarks/comm/quantised.sh", "4", "nothing"], env=environment, capture_output=True
    )
    assert asked.returncode == 2
