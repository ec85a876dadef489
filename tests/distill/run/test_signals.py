"""Preempted runs: SIGTERM anywhere, to one rank or all, ends in exit code 143 and loses no finished step."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
import runs
import torch

from fcsd.distill import loop, prepare
from fcsd.distill.run import checkpoints, manifest, signals
from fcsd.distill.run.report import read_metrics


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """Models and, in ``whole``, the run that nobody interrupted."""
    runs.train(runs.resolved(folder, output_dir=str(folder / "whole"), train__eval_every=3), 2)
    return folder


PHASES = {  # where the signal comes -> the function it comes in, and at which of its calls
    "load": (prepare, "build_training", 1),
    "step": (loop, "launch_step", 3),
    "evaluation": (loop, "measure", 1),
    "last evaluation": (loop, "measure", 2),
    "save": (manifest, "sync", 3),
}


def signalled(recipe: Any, phase: str, told: tuple[int, ...], number: int) -> None:
    """A run in which some ranks get a signal in the given phase."""
    module, name, turn = PHASES[phase]
    real, calls = getattr(module, name), 0

    def reached(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == turn and int(os.environ["RANK"]) in told:
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    setattr(module, name, reached)
    loop.distill_model(recipe)


@pytest.mark.parametrize(
    ("phase", "told", "committed"),
    [
        ("step", (1,), "step-3"),
        pytest.param("evaluation", (0, 1), "step-3", marks=pytest.mark.nightly),
        ("last evaluation", (1,), "step-4"),
        ("save", (0,), "step-2"),
        pytest.param("load", (0, 1), None, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_the_run_with_its_last_step_saved_once(
    folder: Path, tmp_path: Path, phase: str, told: tuple[int, ...], committed: str | None
) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), train__eval_every=3)
    number = signal.SIGUSR1 if phase == "save" else signal.SIGTERM
    assert ranks.exit_codes(2, signalled, recipe, phase, told, number)[0] == [143, 143]
    saved = [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")]
    assert saved[-1:] == ([] if committed is None else [committed])
    assert not (tmp_path / "run" / "final").exists()
    if "evaluation" in phase:
        assert "held_out_kl" not in read_metrics(tmp_path / "run")[-1], "it was not measured to the end"
    runs.train(recipe, 2)
    assert runs.outcome(tmp_path / "run") == runs.outcome(folder / "whole")
    assert runs.numbers(tmp_path / "run")[0] == runs.numbers(folder / "whole")[0], "nor any held-out loss"


def signalled_after_the_decision(recipe: Any) -> None:
    """A run that gets a signal in step 2, after it has decided that this step needs no checkpoint."""
    finish_step, time_left = loop.finish_step, signals.Preemption.time_left
    deciding = False

    def finish(run: Any, tools: Any, duties: Any, step: int, *rest: Any) -> None:
        nonlocal deciding
        deciding = step == 2
        finish_step(run, tools, duties, step, *rest)

    def decide(self: signals.Preemption, world: Any) -> float:
        nonlocal deciding
        left = time_left(self, world)
        if deciding:
            deciding = False
            os.kill(os.getpid(), signal.SIGTERM)
        return left

    loop.finish_step, signals.Preemption.time_left = finish, decide
    loop.distill_model(recipe)


def test_a_signal_after_the_decision_not_to_save_loses_no_step(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), checkpoint__every_steps=0)
    codes, said = ranks.exit_codes(1, signalled_after_the_decision, recipe)
    assert codes == [143], said
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")] == ["step-3"]


def preempted_while_saving(recipe: Any) -> None:
    """A run that is told to end in step 3, while the checkpoint of step 2 is being written beside it."""
    write_states, launch_step = checkpoints.write_states, loop.launch_step
    writing, told, steps = threading.Event(), threading.Event(), 0

    def write(*arguments: Any) -> None:
        if not told.is_set():
            writing.set()
            assert told.wait(200)
        write_states(*arguments)

    def launch(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        launched = launch_step(*arguments)
        if steps == 3:  # the weights have changed, and nothing of the checkpoint is on the disk
            assert writing.wait(200)
            os.kill(os.getpid(), signal.SIGTERM)
            told.set()
        return launched

    checkpoints.write_states, loop.launch_step = write, launch
    loop.distill_model(recipe)


def content(checkpoint: Path, ranks: int) -> tuple[bytes, list[Any], list[Any]]:
    """The weights, the random states and the optimizers' states of a checkpoint."""
    states = [(checkpoint / f"rank-{rank}.json").read_text() for rank in range(ranks)]
    optimizers = [torch.load(checkpoint / f"optimizer/rank-{rank}.pt", weights_only=False) for rank in range(ranks)]
    inner = [optimizer["base_optimizer_state"]["state"] for optimizer in optimizers]
    return (checkpoint / "model/model.safetensors").read_bytes(), states, inner


def test_a_checkpoint_beside_the_run_is_that_of_its_step_and_is_finished_after_a_signal(
    folder: Path, tmp_path: Path
) -> None:
    changes = {"train__eval_every": 3, "checkpoint__overlap": True}
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes)
    codes, said = ranks.exit_codes(2, preempted_while_saving, recipe)
    assert codes == [143, 143], said
    saved = checkpoints.checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["step-2", "step-3"]
    mine, whole = content(saved[0], 2), content(folder / "whole" / "checkpoints" / "step-2", 2)
    assert mine[:2] == whole[:2]
    torch.testing.assert_close(mine[2], whole[2], rtol=0, atol=0)
    shutil.rmtree(saved[1])  # the run continues from the checkpoint that was written beside it
    runs.train(recipe, 2)
    assert runs.outcome(tmp_path / "run") == runs.outcome(folder / "whole")


def slow_to_save(recipe: Any) -> None:
    """A run whose first save took too long for the grace period, and which is preempted in its third step."""
    real, steps = loop.launch_step, 0
    now = time.perf_counter

    def launch_step(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    save = checkpoints.save

    def measured(*arguments: Any, **named: Any) -> Path:
        done = save(*arguments, **named)
        time.perf_counter = lambda: now() + 1000
        return done

    loop.launch_step, checkpoints.save = launch_step, measured
    loop.distill_model(recipe)


def test_a_save_that_takes_too_long_is_not_begun(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"))
    codes, said = ranks.exit_codes(1, slow_to_save, recipe)
    assert codes == [143]
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")] == ["step-2"]
    assert f"the last checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-2'}" in said


def stuck(echo: float, seconds: float) -> None:
    """A step that never ends, signalled twice."""
    signals._ECHO = echo
    with signals.preemptible(seconds) as preemption:
        preemption.defer(lambda: Path("runs/mine/checkpoints/step-7"))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()


@pytest.mark.parametrize(("echo", "seconds", "reason"), [(0.0, 600, "a second signal"), (60, 0.5, "no time is left")])
def test_a_step_that_does_not_end_is_left(echo: float, seconds: float, reason: str) -> None:
    codes, said = ranks.exit_codes(1, stuck, echo, seconds)
    assert codes == [143]
    assert reason in said and "step-7" in said


# A rank that does nothing but wait for a signal, and the command that starts it.
WAITS = """
import os, pathlib, signal, sys
from fcsd.errors import PreemptedError
signals = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
waits, got = (pathlib.Path(sys.argv[1], f"{what}-{os.environ['RANK']}") for what in ("waits", "got"))
waits.touch()
got.write_text(str(int(signal.sigwait(signals))))
sys.exit(PreemptedError.exit_code)
"""
STARTS = "from fcsd.launch.world import ensure_world; ensure_world(2, module='waits')"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_passes_the_signal_on_to_ranks_that_do_nothing_else(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    ) as process:
        while len(list(tmp_path.glob("waits-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(300) == 143
    assert {file.name: int(file.read_text()) for file in tmp_path.glob("got-*")} == {"got-0": number, "got-1": number}


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_passes_the_signal_on(folder: Path, repo: Path, tmp_path: Path, number: signal.Signals) -> None:
    changes = {"train__steps": 100_000, "checkpoint__every_steps": 0}
    runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes)  # writes recipe.yaml
    command = [sys.executable, "-m", "fcsd", "distill", str(folder / "recipe.yaml"), "--gpus", "2"]
    with subprocess.Popen(command, cwd=repo, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("step 3 "):
            assert process.poll() is None
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 143, said
    assert "error: preempted: step" in said
    (checkpoint,) = checkpoints.checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.name == f"step-{read_metrics(tmp_path / 'run')[-1]['step']}"


def test_ctrl_c_ends_all_processes_with_one_line(folder: Path, repo: Path, tmp_path: Path) -> None:
    """A terminal sends SIGINT to every process of the command."""
    runs.resolved(folder, output_dir=str(tmp_path / "run"), train__steps=100_000)  # writes recipe.yaml
    command = [sys.executable, "-m", "fcsd", "distill", str(folder / "recipe.yaml"), "--gpus", "2"]

    def as_in_a_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    with subprocess.Popen(
        command, cwd=repo, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=as_in_a_terminal
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("step 3 "):
            assert process.poll() is None
        ranks_of_it = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("step ")]
    assert (process.returncode, said) == (130, ["error: interrupted\n"])
    assert len(ranks_of_it) == 2 and not any(rank.is_running() for rank in ranks_of_it)
