"""Lost and stuck ranks: every process ends with exit code 6 and the rank's name, whatever a collective waits for."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ranks
import runs
import torch
import torch.distributed as dist

from fcsd.distill.run.identity import require_agreement
from fcsd.distill.run.watchdog import watched
from fcsd.errors import ConfigError
from fcsd.launch.world import join_world, leave


def meet(trouble: str, stuck_seconds: float, silence: float) -> None:
    """Rank 1 gets into trouble; rank 0 waits for it in a collective of a group of their own, or somewhere else."""
    world = join_world()
    with watched(world, stuck_seconds, silence) as dog:
        group = dist.new_group([0, 1])  # has the library's timeout of half an hour, whatever the world's is
        dist.all_reduce(torch.ones(1), group=group)  # they are connected
        dog.beat()
        if world.rank == 1 or trouble == "gone meanwhile":
            misbehave(trouble if world.rank == 1 else "stuck")
        dist.all_reduce(torch.ones(1), group=group)


def misbehave(trouble: str) -> None:
    if trouble == "stuck":
        threading.Event().wait()
    elif trouble == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(3)


@pytest.mark.parametrize(
    ("trouble", "limits", "codes", "message"),
    [
        ("stuck", (3, 600), [6, 6], "no step for 3 seconds, because of rank 1: rank 0 in all_reduce ("),
        ("stopped", (600, 3), [6, -signal.SIGKILL], "rank 1 sent no message for 3 seconds"),
        ("gone", (600, 600), [6, 3], "rank 1 ended while the run was going on"),
        ("gone meanwhile", (600, 600), [6, 3], "rank 1 ended while the run was going on"),
    ],
)
def test_the_others_end_and_name_the_rank(
    trouble: str, limits: tuple[float, float], codes: list[int], message: str
) -> None:
    found, said = ranks.exit_codes(2, meet, trouble, *limits)
    assert found == codes, said
    assert message in said
    if trouble == "stuck":
        assert "; rank 1 in wait (" in said and "in misbehave" in said  # the stack that is to blame


def quiet() -> None:
    with watched(join_world(), 600) as dog:
        dog.beat()
    leave(SystemExit(0))


def test_an_orderly_end_is_no_loss() -> None:
    assert ranks.exit_codes(2, quiet) == ([0, 0], "")


def disagree() -> None:
    world = join_world()
    require_agreement(world, {"seed": 0, "optim.lr": 0.1})
    require_agreement(world, {"seed": 0, "optim.lr": 0.1 * (world.rank + 1)})


def test_processes_that_were_started_differently_end_at_once() -> None:
    for error in ranks.on_ranks(2, disagree):
        assert isinstance(error, ConfigError)
        assert str(error) == "the processes disagree: optim.lr is 0.1 on rank 0 and 0.2 on rank 1"


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_ends_the_command(repo: Path, tmp_path: Path, size: int) -> None:
    runs.write_models(tmp_path)
    changes = {"train__steps": 100_000, "checkpoint__every_steps": 5, "train__batch_tokens": 384}
    runs.resolved(tmp_path, output_dir=str(tmp_path / "run"), **changes)
    command = [sys.executable, "-m", "fcsd", "distill", str(tmp_path / "recipe.yaml"), "--gpus", str(size)]
    with subprocess.Popen(command, cwd=repo, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("step 7 "):
            assert process.poll() is None
        workers = psutil.Process(process.pid).children(recursive=True)
        victim = next(w for w in workers if w.environ().get("RANK") == str(size - 1))
        victim.kill()
        said = process.stderr.read()
    assert process.returncode == 6, said
    assert f"rank {size - 1} was killed by SIGKILL" in said and f"rank {size - 1} ended while" in said
    assert not [worker for worker in workers if lives(worker)]


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end between two questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
