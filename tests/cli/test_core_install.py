"""The command line where only the dependencies of `fcsd` itself are installed, and none of an extra.

`.ci/run` runs this file as a section of its own; the tests of every day leave it out.
"""

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import runs
from distributions import closure, linked_environment
from files import snapshot

from fcsd.distill.run import manifest

pytestmark = pytest.mark.core

# Runs commands one after the other in one process. A command's own exit code, stdout and stderr are its result.
DRIVER = """
import contextlib, io, json, sys
from fcsd.cli.main import app
done = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(arguments)
        except SystemExit as end:
            code = end.code
    done.append([code, out.getvalue(), err.getvalue()])
json.dump(done, sys.stdout)
"""
TRAIN, EVAL = "pip install 'fcsd[train]'", "pip install 'fcsd[eval]'"
# Command -> what its one line of error begins and ends with.
REFUSED = {
    "distill tiny": ("fcsd distill needs accelerate, datasets, deepspeed,", TRAIN),
    "distill --sweep tiny-sweep": ("fcsd distill needs accelerate,", TRAIN),
    "eval teacher": ("fcsd eval needs accelerate, datasets, lm_eval, matplotlib, psutil, pyarrow, scipy:", EVAL),
    "chat teacher --gpus 1": ("fcsd chat --gpus needs accelerate", EVAL),
    "serve student": ("fcsd serve needs vllm:", "pip install 'fcsd[vllm]'"),
    "bench links --out links.json": ("fcsd bench links needs scipy:", TRAIN),
}
CORE = {
    "advise": "advise teacher --gpu L4 --gpus 2 --json",
    "inspect": "inspect teacher --json",
    "convert": "convert teacher converted --wiring farskip --layers all --json",
    "plan": "plan tiny --set model=converted --gpu-mem 80 --json",
    "export": "export converted exported --json",
    "export of a run": "export run exported-run --json",
    "push": "push --help",
    "recipes": "recipes show tiny",
    "env": "env --json",
}


class Installed(NamedTuple):
    """An environment with the core alone: its interpreter, and a folder in which models lie and commands run."""

    python: Path
    folder: Path

    def python_says(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, commands: list[str]) -> dict[str, Any]:
        """Exit code, stdout and stderr of each command."""
        found = self.python_says("-c", DRIVER, json.dumps([command.split() for command in commands]))
        return dict(zip(commands, json.loads(found), strict=True))


@pytest.fixture(scope="module")
def installed(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("core")
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    python = linked_environment(folder / "environment", closure(project["dependencies"]), repo)
    work = folder / "work"
    work.mkdir()
    runs.write_models(work)
    return Installed(python, work)


def write_run(model: Path, run: Path) -> None:
    """A run directory with one committed checkpoint, as distill leaves it."""
    step = run / "checkpoints" / "step-10"
    (step / "model").mkdir(parents=True)
    for file in model.iterdir():
        (step / "model" / file.name).write_bytes(file.read_bytes())
    files = manifest.described(step, manifest.files(step))
    manifest.write_manifest(step, {"step": 10, "identity": {}, "files": files, "progress": {"step": 10}})
    (run / "config.resolved.yaml").write_text("name: mine\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 10, "kl": 0.5, "held_out_sft": 1.5}) + "\n")


def test_the_core_does_its_commands(installed: Installed) -> None:
    write_run(installed.folder / "student", installed.folder / "run")
    found = installed.run(list(CORE.values()))
    for name, command in CORE.items():
        code, out, err = found[command]
        assert code == 0, (name, err)
        if command.endswith("--json"):
            assert json.loads(out), name
    assert (installed.folder / "exported" / "reload_proof.json").is_file()
    assert (installed.folder / "exported-run" / "reload_proof.json").is_file()
    packages = json.loads(found[CORE["env"]][1])["packages"]
    absent = {name for name, version in packages.items() if version is None}
    assert {"deepspeed", "lm_eval", "evalplus", "datasets", "wandb"} <= absent
    assert not {"torch", "transformers", "pydantic", "typer"} & absent


def test_the_plugin_of_vllm_is_imported(installed: Installed) -> None:
    installed.python_says("-c", "from fcsd.serve.vllm import checks, plugin; assert plugin.register")


def test_what_needs_an_extra_says_so_in_one_line_and_writes_nothing(installed: Installed) -> None:
    before = snapshot(installed.folder)
    for command, (code, out, err) in installed.run(list(REFUSED)).items():
        start, end = REFUSED[command]
        (line,) = err.splitlines()
        assert (code, out) == (2, ""), (command, err)
        assert line.startswith(f"error: {start}") and line.endswith(f": {end}"), (command, line)
    assert snapshot(installed.folder) == before
