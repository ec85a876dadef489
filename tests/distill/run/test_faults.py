"""Processes that are killed, die or run out of memory at any point: nobody hangs, nothing committed is lost, and the
resumed run is the uninterrupted one to the last bit."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ranks
import runs
import torch
from runs import outcome, train

from fcsd.distill import loop, prepare
from fcsd.distill.run import checkpoints, manifest, run_dir
from fcsd.distill.step import engine
from fcsd.errors import ConfigError

nightly = pytest.mark.nightly
Whole = Callable[[int], Path]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    """Number of processes -> the directory of a run of four steps that nobody interrupted."""

    @cache
    def run(size: int) -> Path:
        train(runs.resolved(folder, output_dir=str(folder / f"whole-{size}")), size)
        return folder / f"whole-{size}"

    return run


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(recipe: Any, point: str, rank: int, step: int = 4) -> None:
    """A run in which ``rank`` is killed on reaching ``point`` with anything of the checkpoint of ``step`` in hand."""
    module = MODULES.get(point, checkpoints)
    real = getattr(module, point)

    def reached(*arguments: Any, **named: Any) -> Any:
        committed = checkpoints.checkpoints(Path(recipe.recipe.output_dir) / "checkpoints")[-1:]
        paths = [str(one) for one in (*arguments, *committed) if isinstance(one, str | Path)]
        if int(os.environ["RANK"]) == rank and any(f"step-{step}" in path for path in paths):
            die()
        return real(*arguments, **named)

    setattr(module, point, reached)
    loop.distill_model(recipe)


# What a save calls, in order -> the ranks that call it
SAVE = {"_fresh": (0,), "write_states": (0, 1), "write_student": (0, 1), "_record": (0, 1), "sync": (0, 1)}
SAVE |= {"write_manifest": (0,), "_rename": (0,), "retain": (0,), "publish": (0,)}
MODULES: dict[str, ModuleType] = {"write_student": loop, "publish": run_dir}
MODULES |= dict.fromkeys(("write_manifest", "_record", "sync"), manifest)
KILLS = [
    pytest.param(size, point, rank, marks=() if (size, point) == (1, "_rename") else nightly)
    for size in (1, 2)
    for point, ranks in SAVE.items()
    for rank in ranks
    if rank < size
]
BESIDE = {"checkpoint__overlap": True, "checkpoint__every_steps": 1}  # steps 1 to 3 are saved while the run goes on
KILLS_BESIDE = [kill for kill in KILLS if kill.values[1] != "publish"]  # nothing is saved any more by then


@pytest.mark.parametrize(("size", "point", "rank"), KILLS)
def test_a_rank_killed_while_saving(
    folder: Path, whole: Whole, tmp_path: Path, size: int, point: str, rank: int
) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"))
    codes, said = ranks.exit_codes(size, killed, recipe, point, rank)
    assert codes == [-signal.SIGKILL if one == rank else 6 for one in range(size)], said
    assert size == 1 or f"rank {rank} ended while the run was going on" in said
    survivors = [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")]
    assert survivors == (["step-2", "step-4"] if point in ("retain", "publish") else ["step-2"])
    train(recipe, size)
    assert outcome(tmp_path / "run") == outcome(whole(size))
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(("size", "point", "rank"), KILLS_BESIDE)
def test_a_rank_killed_while_it_saves_beside_the_run(
    folder: Path, whole: Whole, tmp_path: Path, size: int, point: str, rank: int
) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **BESIDE)
    codes, said = ranks.exit_codes(size, killed, recipe, point, rank, 3)
    assert codes == [-signal.SIGKILL if one == rank else 6 for one in range(size)], said
    assert size == 1 or f"rank {rank} ended while the run was going on" in said
    survivors = [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")]
    assert survivors == ["step-1", "step-2", *(["step-3"] if point == "retain" else [])]
    train(recipe, size)
    assert outcome(tmp_path / "run") == outcome(whole(size))
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp-*"))


def photographed(recipe: Any, album: Path, step: int) -> None:
    """A run whose checkpoints are copied, as a kill would leave them, before each change of the save of a step."""
    folder, shots, busy = Path(recipe.recipe.output_dir) / "checkpoints", 0, False
    last, before = f"{folder}/step-{step}", f"{folder}/step-{step - recipe.recipe.checkpoint.every_steps}.tmp"
    changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal shots, busy
        writes = event in changes or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        here = str(arguments[0]).startswith((last, before) if shots else last) if writes else False
        if here and not busy:
            busy, shots = True, shots + 1
            shutil.copytree(folder, album / str(shots))
            busy = False

    sys.addaudithook(look)
    loop.distill_model(recipe)


@pytest.mark.parametrize(
    ("changes", "step", "names"),
    [
        ({}, 4, {"step-2", "step-4"}),
        pytest.param(BESIDE, 3, {"step-2", "step-3", "step-4"}, marks=nightly),  # step 4 deletes step 3
    ],
)
def test_at_every_moment_of_a_save_there_is_one_whole_checkpoint(
    folder: Path, tmp_path: Path, changes: dict[str, Any], step: int, names: set[str]
) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), checkpoint__keep=1, **changes)
    assert ranks.exit_code(photographed, recipe, tmp_path / "album", step) == 0
    found = []
    for shot in sorted((tmp_path / "album").iterdir(), key=lambda path: int(path.name)):
        said: list[str] = []
        found.append(checkpoints.find(shot, "auto", said.append).name)  # type: ignore[union-attr]
        assert said == [] and not list(shot.glob("*.tmp-*")), "what is unfinished is removed without a word"
    assert len(found) > 20 and found == sorted(found) and set(found) == names


PHASES = ("load", "forward", "backward", "optimizer", "evaluation")


def dying(recipe: Any, phase: str, end: Callable[[], None]) -> None:
    """A run whose last rank meets its end in the given phase, in the third step if that has steps."""
    here = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def deadly(real: Callable[..., Any], turn: int) -> Callable[..., Any]:
        calls = 0

        def reached(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if here and calls == turn:
                end()
            return real(*arguments, **named)

        return reached

    build = prepare.build_training
    if phase == "load":
        prepare.build_training = deadly(build, 1)
    elif phase == "forward":
        engine.Student.forward = deadly(engine.Student.forward, 5)
    elif phase == "evaluation":
        loop.measure = deadly(loop.measure, 1)
    else:

        def built(model: Any, *arguments: Any) -> Any:
            made = build(model, *arguments)
            if phase == "optimizer":
                made.engine.optimizer.step = deadly(made.engine.optimizer.step, 3)
            else:
                model.lm_head.weight.register_hook(deadly(lambda grad: grad, 5))
            return made

        prepare.build_training = built
    loop.distill_model(recipe)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=nightly)])
@pytest.mark.parametrize("phase", [p if p == "backward" else pytest.param(p, marks=nightly) for p in PHASES])
def test_a_rank_that_dies_is_named_by_the_others(folder: Path, tmp_path: Path, phase: str, size: int) -> None:
    changes = {"train__batch_tokens": 128 * size, "train__eval_every": 3}
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes)
    codes, said = ranks.exit_codes(size, dying, recipe, phase, die)
    assert codes == [6] * (size - 1) + [-signal.SIGKILL], said
    assert f"rank {size - 1}" in said and "ended while the run was going on" in said


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_says_what_to_lower_and_nobody_waits(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"))
    codes, said = ranks.exit_codes(2, dying, recipe, "forward", out_of_memory)
    assert codes == [6, 8], said
    assert "error: out of GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB." in said
    assert "lower train.micro_batch_size or set train.activation_checkpointing: true" in said


def different(recipes: list[Any]) -> None:
    loop.distill_model(recipes[int(os.environ["RANK"])])


def test_ranks_with_different_recipes_end_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    recipes = [runs.resolved(folder, output_dir=str(tmp_path / "run"), seed=seed) for seed in (1, 2)]
    for error in ranks.on_ranks(2, different, recipes):
        assert isinstance(error, ConfigError) and "seed is 1 on rank 0 and 2 on rank 1" in str(error)
    assert not (tmp_path / "run").exists()


LONG = {"train__steps": 12, "checkpoint__every_steps": 1, "train__eval_every": 4, "checkpoint__keep": 99}


@nightly
def test_killed_again_and_again_at_random_it_is_still_the_same_run(folder: Path, tmp_path: Path) -> None:
    train(runs.resolved(folder, output_dir=str(tmp_path / "whole"), **LONG))
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **LONG)
    draw, kills = random.Random(0), 0
    while True:
        before = len(checkpoints.checkpoints(tmp_path / "run" / "checkpoints"))
        process = ranks.start(loop.distill_model, recipe)
        # Each attempt commits something, or there would be no end to them.
        while process.is_alive() and len(checkpoints.checkpoints(tmp_path / "run" / "checkpoints")) == before:
            time.sleep(0.01)
        process.join(draw.random() * 0.5)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    assert kills > 3
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@nightly
def test_from_any_step_it_goes_on_as_if_it_had_not_stopped(folder: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, in the second one, and between evaluations."""
    train(runs.resolved(folder, output_dir=str(tmp_path / "whole"), **LONG), 2)
    expected = outcome(tmp_path / "whole")
    for step in (1, 4, 7, 11):
        run = tmp_path / f"from-{step}"
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step}"
        train(runs.resolved(folder, output_dir=str(run), **LONG), 2, resume=str(checkpoint))
        numbers, weights = outcome(run)
        assert (numbers, weights) == (expected[0][step:], expected[1])
