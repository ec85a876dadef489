"""docs/launching.md: torchrun's line trains, and what Kubernetes and Ray would start is a command that fcsd has."""

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
import typer
import yaml
from torch.distributed.run import parse_args

from fcsd.cli.main import app
from fcsd.distill.run.report import read_metrics
from fcsd.parallel.process_settings import DEFAULTS


def block(repo: Path, language: str) -> str:
    """The last block of a language in the page."""
    *_, text = re.findall(rf"```{language}\n(.*?)```", (repo / "docs/launching.md").read_text(), re.DOTALL)
    return text


def distill_options() -> set[str]:
    command = typer.main.get_command(app).commands["distill"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}


def test_the_line_of_torchrun_trains_on_two_processes(repo: Path, tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path, train__steps=2, checkpoint__every_steps=0)
    words = shlex.split(block(repo, "bash"))
    assert words[0] == "torchrun" and words[-1] == "RECIPE"
    words = [word.replace("--nproc-per-node=8", "--nproc-per-node=2") for word in words[1:-1]]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
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
    where = ["--gpus", "8", "--rendezvous", "node-0:29400"]
    assert [command[1:] for command, _ in started] == [
        ["-P", "-m", "fcsd", "distill", "/shared/recipe.yaml", "--nodes", "2", "--node-rank", str(node), *where]
        for node in (0, 1)
    ]
    assert {word for word in started[0][0][1:] if word.startswith("--")} <= distill_options()
    left = os.environ.keys() - started[0][1].keys()
    assert left == {"RANK", "WORLD_SIZE", "LOCAL_RANK"}, "with WORLD_SIZE set, fcsd would start no processes"
