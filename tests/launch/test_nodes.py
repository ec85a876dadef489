"""Several nodes: the commands they run, the Slurm script, and who is missed when not all of them come."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import runs
from ranks import fcsd, free_port
from typer.testing import CliRunner

from fcsd.cli.main import app
from fcsd.config import load_recipe
from fcsd.errors import ConfigError, PeerLostError
from fcsd.launch import preflight
from fcsd.launch import world as launch
from fcsd.launch.nodes import node_commands, node_of, slurm_script


def test_two_nodes_run_what_the_command_prints(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path)
    asked = ["distill", tmp_path / "recipe.yaml", "--set", "train.steps=2", "--gpus", "1", "--nodes", "2"]
    printed = fcsd(*asked, "--rendezvous", f"127.0.0.1:{free_port()}")
    assert printed.returncode == 0, printed.stderr
    commands = [line for line in printed.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 2 and not (tmp_path / "run").exists()
    nodes = [
        subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    told = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert (tmp_path / "run/final/config.json").exists()
    manifest = json.loads((tmp_path / "run/checkpoints/step-2/MANIFEST.json").read_text())
    assert manifest["identity"]["processes"] == 2


def test_the_name_of_node_0_may_be_left_open() -> None:
    text = node_commands(["distill", "my recipe.yaml", "--nodes", "2"], 2, None)
    assert text.count("HOST_OF_NODE_0:29400") == 2 and "'my recipe.yaml'" in text and "--node-rank 1" in text


def test_an_address_without_nodes_is_refused(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path)
    done = fcsd("distill", tmp_path / "recipe.yaml", "--rendezvous", "host:29400")
    assert done.returncode == 2 and "Give --nodes N too." in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rank", "rendezvous"),
    [(0, None), (0, "host"), (0, "host:0"), (0, "host:70000"), (0, "a b:29400"), (2, "host:29400")],
)
def test_nodes_that_contradict_themselves_are_refused(rank: int, rendezvous: str | None) -> None:
    with pytest.raises(ConfigError):
        node_of(2, rank, rendezvous)


def test_the_slurm_script_carries_the_recipe_and_requeues(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path, output_dir=str(tmp_path / "a run"))
    asked = ["distill", tmp_path / "recipe.yaml", "--set", "optim.lr=3e-4", "--gpus", "8", "--nodes", "3", "--slurm"]
    printed = fcsd(*asked)
    assert printed.returncode == 0 and "sbatch" in printed.stderr
    script = tmp_path / "job.sbatch"
    script.write_text(printed.stdout)
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert "#SBATCH --nodes=3" in printed.stdout and not (tmp_path / "a run").exists()

    # What the cluster's own programs would be asked to do, by stand-ins that write it down.
    tools = tmp_path / "bin"
    tools.mkdir()
    seen = tmp_path / "seen"
    for name, body in {
        "srun": 'printf "%s\\n" "$@" >> "$SEEN"; echo "$host:$port" >> "$SEEN"; exit "$CODE"',
        "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "$@" >> "$SEEN"; fi',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    cluster = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "4711", "SEEN": str(seen)}
    for code in ("143", "5"):
        environment = {**os.environ, **cluster, "CODE": code, "PATH": f"{tools}:{os.environ['PATH']}"}
        assert subprocess.run(["bash", script], env=environment, timeout=60).returncode == int(code)
    assert seen.read_text().count("requeue 4711") == 1
    assert seen.read_text().count("first:24711") == 2 and "--nodes 3" in seen.read_text()
    carried = load_recipe(tmp_path / "a run/submitted.yaml").recipe
    assert carried == load_recipe(tmp_path / "recipe.yaml", ["optim.lr=3e-4"]).recipe


def test_the_signal_comes_as_early_as_the_job_waits_for_its_nodes(tmp_path: Path) -> None:
    script = slurm_script(runs.resolved(tmp_path), nodes=1, gpus=2, options=[])
    assert "--signal=USR1@120" in script and "--wait=120" in script


SWEEP = {"stages": [{"optim.lr": [1e-3, 2e-3]}], "steps": 2}


def test_a_sweep_over_several_nodes_is_a_slurm_job(tmp_path: Path) -> None:
    runs.resolved(tmp_path, sweep=SWEEP)
    asked = ["distill", "--sweep", tmp_path / "recipe.yaml", "--gpus", "8", "--nodes", "2"]
    refused = fcsd(*asked)
    assert refused.returncode == 2 and "must be a Slurm job" in refused.stderr and "--slurm" in refused.stderr
    runs.resolved(tmp_path)
    assert "has no `sweep:` section" in fcsd(*asked, "--slurm").stderr


@pytest.mark.nightly
def test_the_job_of_a_sweep_starts_each_run_on_all_nodes(tmp_path: Path) -> None:
    """With stand-ins for the cluster's programs: two nodes on this machine."""
    runs.write_models(tmp_path, "qwen3_moe")
    changes = {"parallel__ep_size": 2, "train__steps": 3, "output_dir": str(tmp_path / "out")}
    runs.resolved(tmp_path, sweep=SWEEP, **changes)
    script = tmp_path / "job.sbatch"
    script.write_text(fcsd("distill", "--sweep", tmp_path / "recipe.yaml", "--nodes", "2", "--slurm").stdout)
    tools = tmp_path / "bin"
    tools.mkdir()
    both = 'SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; code=$?; wait; exit $code'
    for name, body in {
        "srun": f'echo step >> "$SEEN"; while [[ "$1" == --* ]]; do shift; done; {both}',
        "scontrol": "echo 127.0.0.1",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    seen = tmp_path / "seen"
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": str(free_port()), "SEEN": str(seen)}
    environment = {**os.environ, **job, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script], env=environment, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [trial["status"] for trial in record["trials"].values()] == ["done", "done"]
    assert seen.read_text().split() == ["step"] * 3, "two trials and the full run"
    assert (Path(record["run"]) / "final" / "model.safetensors").exists()


def test_the_missing_rank_is_named(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    runs.resolved(tmp_path)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    run = fcsd("distill", tmp_path / "recipe.yaml", "--join-timeout", "2", **where)
    assert run.returncode == 6, run.stderr
    assert "rank 1 of 2 did not come up within 2 seconds" in run.stderr and "unset WORLD_SIZE" in run.stderr
    assert not (tmp_path / "run").exists()


def test_the_missing_node_is_named() -> None:
    with pytest.raises(PeerLostError, match="nodes 1, 2 of 3 did not come up"):
        preflight.meet("node", 0, 3, "127.0.0.1", free_port(), serves=True, timeout=1)


def test_a_meeting_place_that_is_taken_or_empty() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            preflight.meet("rank", 0, 2, "127.0.0.1", taken.getsockname()[1], serves=True, timeout=2)
    with pytest.raises(PeerLostError, match="nobody answers at"):
        preflight.meet("rank", 1, 2, "127.0.0.1", free_port(), serves=False, timeout=1)


def test_ctrl_c_ends_the_waiting() -> None:
    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for number in range(2):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            preflight.meet("rank", number, 2, "127.0.0.1", free_port(), serves=number == 0, timeout=60)
    signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 50


WHOLE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ({"RANK": ""}, "WORLD_SIZE=2, no RANK, MASTER_ADDR=here"),
        ({"RANK": "2"}, "RANK=2"),
        ({"MASTER_ADDR": ""}, "no MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    ],
)
def test_what_a_launcher_left_behind_is_refused_at_once(left, told, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (WHOLE | left).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    for gpus in (None, 2):
        with pytest.raises(ConfigError, match=told) as refused:
            launch.ensure_world(gpus)
        assert "unset WORLD_SIZE" in str(refused.value.hint)


def test_fewer_processes_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, f" {value}\n" if name == "WORLD_SIZE" else value)
    assert preflight.launched() == (1, 2) and not launch.first_rank()
    launch.ensure_world(2)
    with pytest.raises(ConfigError, match="3 processes are asked for, and WORLD_SIZE=2"):
        launch.ensure_world(3)
    monkeypatch.delenv("WORLD_SIZE")
    assert preflight.launched() == (0, 1) and launch.first_rank(), "a rank alone says nothing"
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    assert preflight.launched() == (0, 1)


def test_a_group_that_a_caller_has_made_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    world = launch.join_world()
    assert (world.rank, world.size) == (1, 2)


def test_a_chat_in_one_process_asks_for_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = str(tmp_path / "none")
    alone, divided = (CliRunner().invoke(app, ["chat", model, *more]) for more in ([], ["--gpus", "8"]))
    assert f"{model}: no such directory" in alone.stderr and "is not that of a launcher" in divided.stderr


def test_who_waits_long_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(preflight, "_SAY_AFTER", 0.1)
    caplog.set_level("INFO", "fcsd")
    for number, told in ((0, "rank 1 of 2 did not come yet"), (1, "nobody answers yet at 127.0.0.1:")):
        with pytest.raises(PeerLostError):
            preflight.meet("rank", number, 2, "127.0.0.1", free_port(), serves=number == 0, timeout=0.5)
        assert told in caplog.text and "waits up to 0.5 seconds" in caplog.text and "unset WORLD_SIZE" in caplog.text
        caplog.clear()
