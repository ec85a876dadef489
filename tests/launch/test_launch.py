"""Processes: torchrun only when it is needed, errors that reach every rank, the engine's configuration."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fcsd.distill.step.engine import accumulation, deepspeed_config
from fcsd.errors import BadInputError, ConfigError
from fcsd.launch import world as launch


def test_several_processes_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(launch, "_torchrun", started.append)
    monkeypatch.setattr(sys, "argv", ["fcsd", "distill", "r.yaml", "--gpus", "2"])
    launch.ensure_world(None)
    launch.ensure_world(1)
    assert started == []
    launch.ensure_world(2)
    assert started[0][-7:] == ["-m", "--", "fcsd", "distill", "r.yaml", "--gpus", "2"]
    assert "--nproc-per-node=2" in started[0]
    assert os.environ["PYTHONSAFEPATH"] == "1"  # otherwise each process would import from the current directory
    for name, value in ranks._worlds(2)[0].items():
        monkeypatch.setenv(name, value)
    launch.ensure_world(2)
    assert len(started) == 1


def test_without_a_number_all_gpus_take_part_that_divide_the_work(monkeypatch, caplog) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with caplog.at_level("INFO", "fcsd"):
        assert (launch.gpus_here(), launch.gpus_here(lambda count: 12 % count == 0)) == (8, 6)
    assert caplog.messages[1] == "6 of the 8 GPUs here take part; --gpus N says how many"
    assert launch.gpus_here(lambda count: False) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert launch.gpus_here() == 1
    for name, value in ranks._worlds(2)[0].items():
        monkeypatch.setenv(name, value)
    assert launch.gpus_here() == 2


def test_the_exit_code_of_a_process_is_that_of_the_command(repo: Path, tmp_path: Path) -> None:
    asked = ["distill", "recipes/tiny.yaml", "--gpus", "2", "--set", f"model={tmp_path}"]
    run = ranks.fcsd(*asked, "--output-dir", tmp_path / "run", cwd=repo)
    assert run.returncode == 3, run.stderr
    assert "config.json" in run.stderr


@pytest.mark.parametrize(
    ("exits", "cause"),
    [
        ([(0, 6, 100), (1, -9, 100)], 1),  # rank 0 missed rank 1 and ended before torchrun looked
        ([(0, 6, 100), (1, -9, 101)], 1),
        ([(0, 6, 100), (1, 8, 100)], 1),
        ([(1, 6, 100), (0, 143, 100)], 1),  # the lost rank is on another node; torchrun ended rank 0
        ([(1, 5, 100), (0, -9, 130)], 1),  # rank 0 did not end in time after rank 1 had failed
    ],
)
def test_the_command_ends_like_the_process_that_failed_by_itself(exits: list[tuple[int, ...]], cause: int) -> None:
    failures = {}
    for rank, code, when in exits:
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        failures[rank].timestamp = when
    assert launch._cause(failures) == (cause, failures[cause])


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has 2"):
        launch.ensure_world(3)


def gather() -> list[Any]:
    world = launch.join_world()
    seen = [world.everywhere(lambda: world.rank * 10), world.on_first(lambda: f"from {world.rank}")]
    try:
        world.everywhere(fail if world.rank == 1 else int)
    except BadInputError as error:
        seen.append((str(error), error.hint))
    return seen


def fail() -> int:
    raise BadInputError("bad", hint="fix it")


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    assert ranks.on_ranks(2, gather) == [[[0, 10], "from 0", ("bad", "fix it")]] * 2


def alone() -> tuple[Any, ...]:
    del os.environ["WORLD_SIZE"], os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    world = launch.join_world()
    assert launch.join_world() == world
    return world.rank, world.size, world.device.type, os.environ["DS_ACCELERATOR"]


def test_one_process_needs_no_launcher() -> None:
    assert ranks.on_ranks(1, alone) == [(0, 1, "cpu", "cpu")]


def depart(code: int, marker: Path) -> None:
    launch.join_world()
    atexit.register(marker.touch)
    threading.Thread(target=threading.Event().wait).start()  # an interpreter that finalises waits for it
    launch.leave(SystemExit(code))


@pytest.mark.parametrize("code", [0, 5, 143])
def test_a_process_leaves_its_world_with_its_own_exit_code_and_cleans_up(tmp_path: Path, code: int) -> None:
    assert ranks.exit_code(depart, code, tmp_path / "marker") == code
    assert (tmp_path / "marker").exists()


def depart_alone(marker: Path) -> None:
    try:
        launch.leave(SystemExit(7))
    finally:  # is passed over where the interpreter ends at once
        marker.touch()


def test_without_a_world_the_interpreter_ends_as_usual(tmp_path: Path) -> None:
    """In a process of its own, because another test may have joined a world in that of pytest."""
    assert ranks.exit_code(depart_alone, tmp_path / "marker") == 7
    assert (tmp_path / "marker").exists()


def test_accumulation_follows_from_the_batch_in_tokens(tmp_path: Path) -> None:
    recipe = runs.resolved(tmp_path).recipe
    assert [accumulation(recipe, size) for size in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ConfigError, match="processes = 192"):
        accumulation(recipe, 3)
    config = deepspeed_config(recipe, 2)
    assert config["gradient_accumulation_steps"] == 2 and config["zero_optimization"] == {"stage": 1}


def test_ctrl_c_while_a_process_that_is_done_waits_for_the_others_ends_it_without_a_traceback() -> None:
    code = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fcsd.launch import world\nimport torch.distributed as dist\nworld.join_world()\n"
        "dist.barrier = lambda **_: os.kill(os.getpid(), signal.SIGINT)\n"
        "world.leave(SystemExit(0))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
