"""docs/launching.md: torchrun's line and Slurm's script train, and Kubernetes and Ray would start what they do."""

import json
import os
import re
import shlex
import string
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from ranks import fcsd, free_port
from torch.distributed.run import parse_args

from fcsd.distill.run.report import read_metrics
from fcsd.parallel.process_settings import DEFAULTS


def block(repo: Path, language: str) -> str:
    """The last block of a language in the page."""
    return blocks(repo, language)[-1]


def blocks(repo: Path, language: str) -> list[str]:
    """The blocks of a language in the page."""
    return re.findall(rf"```{language}\n(.*?)```", (repo / "docs/launching.md").read_text(), re.DOTALL)


# In place of fcsd: meets the other tasks, and leaves the arguments of all beside ``SEEN``.
MEETS = """
import json, os, pathlib, sys
from fcsd.launch.world import join_world, leave
world = join_world()
every = world.everywhere(lambda: [world.rank, *sys.argv[1:]])
world.on_first(lambda: pathlib.Path(os.environ["SEEN"]).with_name("met").write_text(json.dumps(every)))
leave(SystemExit(0))
"""


def slurm(
    folder: Path, script: str, tasks: int = 2, fcsd: tuple[str, ...] = ("-m", "fcsd"), **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script for sbatch with stand-ins for the cluster's programs: as many tasks on this machine."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, body in {
        "srun": 'echo step >> "$SEEN"; while [[ "$1" == --* ]]; do shift; done; [ -z "${CODE:-}" ] || exit "$CODE"\n'
        'for ((task = 1; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done\n'
        'SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait; exit $code',
        "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$1-$2" >> "$SEEN"; fi',
        "fcsd": f'exec {shlex.join([sys.executable, *fcsd])} "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": str(free_port() - 20_000), "SEEN": str(folder / "seen")}
    job |= {"SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(tasks)}
    environment = {**os.environ, **job, **more, "PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script], env=environment, timeout=500, capture_output=True, text=True)


@pytest.mark.nightly
def test_the_script_of_slurm_trains_on_all_tasks(repo: Path, tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path, train__steps=2)
    script, _ = blocks(repo, "sh")
    done = slurm(tmp_path, script.replace("RECIPE", str(tmp_path / "recipe.yaml")))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run/checkpoints/step-2/MANIFEST.json").read_text())
    assert manifest["identity"]["processes"] == 2


def test_the_script_of_slurm_makes_one_world_of_all_tasks_and_requeues(repo: Path, tmp_path: Path) -> None:
    script, _ = blocks(repo, "sh")
    done = slurm(tmp_path, script, fcsd=("-c", MEETS))
    assert done.returncode == 0, done.stderr
    met = json.loads((tmp_path / "met").read_text())
    assert met == [[0, "distill", "RECIPE"], [1, "distill", "RECIPE"]]
    assert (tmp_path / "seen").read_text().split() == ["step"]
    assert slurm(tmp_path, script, CODE="143").returncode == 143
    assert slurm(tmp_path, script, CODE="5").returncode == 5
    assert [line.split("-")[0] for line in (tmp_path / "seen").read_text().split()] == [
        "step",
        "step",
        "requeue",
        "step",
    ]


@pytest.mark.nightly
def test_the_sweep_of_slurm_starts_each_run_on_all_tasks(repo: Path, tmp_path: Path) -> None:
    runs.write_models(tmp_path, "qwen3_moe")
    sweep = {"stages": [{"optim.lr": [1e-3, 2e-3]}], "steps": 2}
    changes = {"parallel__ep_size": 2, "train__steps": 3, "output_dir": str(tmp_path / "out")}
    runs.resolved(tmp_path, sweep=sweep, **changes)
    script, line = blocks(repo, "sh")
    start = next(one for one in script.splitlines() if one.startswith("srun "))
    done = slurm(tmp_path, script.replace(start, line).replace("RECIPE", str(tmp_path / "recipe.yaml")))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [trial["status"] for trial in record["trials"].values()] == ["done", "done"]
    assert (tmp_path / "seen").read_text().split() == ["step"] * 3, "two trials and the full run"
    assert (Path(record["run"]) / "final" / "model.safetensors").exists()


def test_a_command_that_starts_runs_is_for_sweeps(repo: Path) -> None:
    refused = fcsd("distill", "tiny", "--launch", "srun", cwd=repo)
    assert refused.returncode == 2 and "--launch is for --sweep" in refused.stderr
    refused = fcsd("distill", "--sweep", "tiny-sweep", "--launch", "srun 'bash", cwd=repo)
    assert refused.returncode == 2 and "--launch srun 'bash: " in refused.stderr


def by_torchrun(repo: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, cwd=repo, env={**os.environ, **more}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def words_of_torchrun(repo: Path) -> list[str]:
    words = shlex.split(block(repo, "bash"))
    assert words[0] == "torchrun" and words[-1] == "RECIPE"
    return [word.replace("--nproc-per-node=8", "--nproc-per-node=2") for word in words[1:-1]]


def test_the_line_of_torchrun_makes_one_world_of_its_processes(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    words = ["meets" if word == "fcsd" else word for word in words_of_torchrun(repo)]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    by_torchrun(repo, *words, "RECIPE", SEEN=str(tmp_path / "seen"), PYTHONPATH=path)
    met = json.loads((tmp_path / "met").read_text())
    assert met == [[0, "distill", "RECIPE"], [1, "distill", "RECIPE"]]


@pytest.mark.nightly
def test_the_line_of_torchrun_trains_on_two_processes(repo: Path, tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path, train__steps=2, checkpoint__every_steps=0)
    done = by_torchrun(repo, *words_of_torchrun(repo), str(tmp_path / "recipe.yaml"))
    assert done.stdout == f"{tmp_path / 'run'}\n", "said once"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_the_pods_of_kubernetes_call_torchrun_with_their_own_numbers(repo: Path) -> None:
    job = yaml.safe_load(block(repo, "yml"))
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert set(specs) == {"Master", "Worker"}
    for rank, spec in enumerate(specs.values()):
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["command"] == ["sh", "-c"]
        assert {one["name"]: one["value"] for one in container["env"]} == DEFAULTS
        pod = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "fcsd-master-0", "MASTER_PORT": "23456"}
        words = shlex.split(string.Template(container["args"][0]).substitute(pod))
        assert words[:2] == ["exec", "torchrun"]
        given = parse_args(words[2:])
        assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", rank, "8")
        assert (given.master_addr, given.master_port) == ("fcsd-master-0", 23456)
        assert (given.module, given.training_script) == (True, "fcsd")
        assert given.training_script_args == ["distill", "/shared/recipe.yaml"]


def test_each_worker_of_ray_calls_fcsd_for_its_node(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[dict[str, Any]] = []
    started: list[tuple[list[str], dict[str, str]]] = []
    rank = 0

    class Trainer:
        def __init__(self, function: Any, **options: Any) -> None:
            trained.append({"function": function, **options})

        def fit(self) -> None:
            nonlocal rank
            while rank < trained[-1]["scaling_config"]["num_workers"]:
                trained[-1]["function"](trained[-1]["train_loop_config"])
                rank += 1

    context = types.SimpleNamespace(get_world_rank=lambda: rank)
    modules: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.train": {"ScalingConfig": dict, "get_context": lambda: context},
        "ray.train.torch": {"TorchConfig": dict, "TorchTrainer": Trainer},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in {"MASTER_ADDR": "node-0", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", lambda command, env, check: started.append((command, env)))
    exec(block(repo, "python"), {})
    for node, (command, environment) in enumerate(started):
        assert command[1:3] == ["-m", "torch.distributed.run"] and environment.items() >= DEFAULTS.items()
        given = parse_args(command[3:])
        assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", node, "8")
        assert (given.master_addr, given.master_port) == ("node-0", 29400)
        assert [given.training_script, *given.training_script_args] == ["fcsd", "distill", "/shared/recipe.yaml"]
    left = os.environ.keys() - started[0][1].keys()
    assert left == {"RANK", "WORLD_SIZE", "LOCAL_RANK"}, "with WORLD_SIZE set, fcsd would start no processes"
