"""Checkpoints that are damaged or of another run; resumed to the last bit. See test_faults.py for kills."""

import copy
import json
import os
import resource
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from runs import outcome, train
from safetensors.torch import load_file

from fcsd import __version__
from fcsd.config import ResolvedRecipe
from fcsd.disk import json_sha256
from fcsd.distill import loop
from fcsd.distill.run import checkpoints, identity, manifest, run_dir
from fcsd.distill.run.report import read_metrics
from fcsd.distill.run.snapshot import random_state, set_random_state
from fcsd.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    """The directory of a run of four steps in one process, with checkpoints after two and four."""
    train(runs.resolved(folder, output_dir=str(folder / "single")))
    return folder / "single"


@pytest.fixture(scope="module", params=[1, 2])
def finished(request: pytest.FixtureRequest, folder: Path, single: Path) -> tuple[int, Path]:
    """A number of processes, and the directory of the same run in so many."""
    if request.param == 1:
        return 1, single
    train(runs.resolved(folder, output_dir=str(folder / "double")), 2)
    return 2, folder / "double"


def test_two_steps_and_a_resume_are_four_steps(folder: Path, finished: tuple[int, Path], tmp_path: Path) -> None:
    size, run = finished
    resumed = runs.cut_short(run, tmp_path / "run")
    train(runs.resolved(folder, output_dir=str(resumed)), size)
    assert outcome(resumed) == outcome(run)
    assert len((resumed / "command.txt").read_text().splitlines()) == 2


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "truncate":
        del data[-1]
    elif how == "grow":
        data.append(0)
    path.unlink()
    if how != "delete":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "truncate", "grow", "delete"])
def test_damage_to_any_file_is_found_and_the_older_one_taken(
    finished: tuple[int, Path], tmp_path: Path, how: str
) -> None:
    _, run = finished
    names = [
        path.relative_to(run / "checkpoints") for path in (run / "checkpoints" / "step-4").rglob("*") if path.is_file()
    ]
    assert len(names) > 6
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(run / "checkpoints", folder, copy_function=os.link)  # spoil() writes new files
        spoil(folder / name, how)
        said: list[str] = []
        found = checkpoints.find(folder, "auto", said.append)
        assert found == folder / "step-2", name
        assert len(said) == 1 and "step-4" in said[0]
        assert len(list(folder.glob("step-4.corrupt-*"))) == 1


def test_when_all_are_damaged_nothing_is_deleted_or_started_over(finished: tuple[int, Path], tmp_path: Path) -> None:
    shutil.copytree(finished[1] / "checkpoints", tmp_path / "checkpoints")
    for name in ("step-2", "step-4"):
        spoil(tmp_path / "checkpoints" / name / "MANIFEST.json", "truncate")
        spoil(tmp_path / "checkpoints" / name / "model" / "config.json", "flip")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no checkpoint is whole, 2 are damaged"):
            checkpoints.find(tmp_path / "checkpoints", "auto", lambda _: None)
    assert len(list(tmp_path.glob("checkpoints/*/model/model.safetensors"))) == 2
    with pytest.raises(CheckpointError):
        checkpoints.find(tmp_path / "checkpoints", str(next(tmp_path.glob("checkpoints/*"))), print)


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def seal(checkpoint: Path) -> None:
    """Writes the manifest anew, as somebody can who has changed a file."""
    content = manifest.read_manifest(checkpoint)
    names = manifest.files(checkpoint)
    names.remove(manifest.MANIFEST)
    content = {key: content[key] for key in ("step", "identity", "progress")}
    manifest.write_manifest(checkpoint, {**content, "files": manifest.described(checkpoint, names)})


def test_a_sealed_checkpoint_runs_no_code(folder: Path, single: Path, tmp_path: Path) -> None:
    run = runs.cut_short(single, tmp_path / "run")
    checkpoint = run / "checkpoints" / "step-2"
    torch.save({"state": Planted(tmp_path / "ran")}, checkpoint / "optimizer/rank-0.pt")
    seal(checkpoint)
    with pytest.raises(CheckpointError, match="holds objects that no optimizer"):
        loop.distill_model(runs.resolved(folder, output_dir=str(run)))
    assert not (tmp_path / "ran").exists()


def test_a_sealed_state_of_an_optimizer_that_is_none_is_damage(folder: Path, single: Path, tmp_path: Path) -> None:
    run = runs.cut_short(single, tmp_path / "run")
    checkpoint = run / "checkpoints" / "step-2"
    file = checkpoint / "optimizer/rank-0.pt"
    whole = file.read_bytes()
    listed, other = BytesIO(), BytesIO()
    torch.save([1, 2], listed)
    torch.save({"param_groups": 5}, other)
    for data in (b"", b"\x80", whole[: len(whole) // 2], listed.getvalue(), other.getvalue()):
        file.write_bytes(data)
        seal(checkpoint)
        with pytest.raises(CheckpointError, match="optimizer") as caught:
            loop.distill_model(runs.resolved(folder, output_dir=str(run)))
        assert "\n" not in str(caught.value) and caught.value.hint


def test_a_sealed_state_with_tensors_of_other_shapes_is_damage(folder: Path, single: Path, tmp_path: Path) -> None:
    """A tensor with one value would be copied to all places of the one that is expected."""
    run = runs.cut_short(single, tmp_path / "run")
    checkpoint = run / "checkpoints" / "step-2"
    file = checkpoint / "optimizer/rank-0.pt"
    whole = torch.load(file, weights_only=False)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.save(cut_first(whole, name), file)
        seal(checkpoint)
        with pytest.raises(
            CheckpointError, match=r"does not hold the state of this optimizer: a tensor of shape \[1\]"
        ):
            loop.distill_model(runs.resolved(folder, output_dir=str(run)))


def cut_first(state: Any, name: str) -> Any:
    """A copy in which the first tensor under ``name`` has one value."""
    found = copy.deepcopy(state)
    stack = [found]
    while stack:
        value = stack.pop()
        if isinstance(value, dict) and isinstance(value.get(name), torch.Tensor) and value[name].numel() > 1:
            value[name] = value[name].flatten()[:1].clone()
            return found
        stack += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    raise AssertionError(f"no {name}")


def test_a_changed_run_is_refused_by_name(folder: Path, single: Path, tmp_path: Path) -> None:
    for named, changes in [
        ("optim.lr was 0.001 and is now 0.002", {"optim__lr": 0.002}),
        ("seed was 0 and is now 5", {"seed": 5}),
        ("corpus.jsonl was", {"data__sources": [{"path": "CHANGED"}]}),
    ]:
        run = runs.cut_short(single, tmp_path / named[:9])
        if "data__sources" in changes:
            other = shutil.copy(folder / "corpus.jsonl", tmp_path / "corpus.jsonl")
            with Path(other).open("a") as file:
                file.write('{"text": "one more"}\n')
            changes = {"data__sources": [{"path": str(other)}]}
        with pytest.raises(CheckpointError, match=named):
            train(runs.resolved(folder, output_dir=str(run), **changes))
        assert len(read_metrics(run)) == 4, "a refused run changes nothing"


def newer(recipe: ResolvedRecipe) -> None:
    identity.__version__ = "99"
    loop.distill_model(recipe)


def test_other_code_does_not_continue_a_run(folder: Path, single: Path, tmp_path: Path) -> None:
    run = runs.cut_short(single, tmp_path / "run")
    (error,) = ranks.on_ranks(1, newer, runs.resolved(folder, output_dir=str(run)))
    assert isinstance(error, CheckpointError) and f"version of fcsd was '{__version__}' and is now '99'" in str(error)


def test_free_fields_may_change_and_a_path_may_be_given(folder: Path, single: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), name="other", checkpoint__keep=1)
    train(recipe, resume=str(single / "checkpoints" / "step-2"))
    assert outcome(tmp_path / "run")[1] == outcome(single)[1]
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run" / "checkpoints")] == ["step-4"]


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (1, "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((2, "bf16"), (0, "bf16"), (0, "fp32"), (2, "fp32"))
        ),
    ],
)
def test_each_tensor_is_stored_once_and_resumes_to_the_last_bit(
    folder: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    changes = {"parallel__zero_stage": stage, "train__dtype": dtype}
    train(runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    stored = load_file(checkpoint / "model/model.safetensors")
    weights = [tensor for name, tensor in stored.items() if ".mlp.gate." not in name]  # routers may stay in fp32
    parameters = sum(tensor.numel() for tensor in weights)
    assert sum(tensor.nbytes for tensor in weights) == parameters * (2 if dtype == "bf16" else 4)
    states = (checkpoint / "optimizer/rank-0.pt").stat().st_size
    wide = parameters * (12 if dtype == "bf16" else 8)  # the moments and, for bf16 weights, the fp32 weights
    assert wide < states < 1.05 * wide + 150_000
    part = runs.cut_short(tmp_path / "run", tmp_path / "resumed")
    train(runs.resolved(folder, output_dir=str(part), **changes))
    assert outcome(part) == outcome(tmp_path / "run")


def test_a_checkpoint_of_another_version_is_refused_and_keeps_its_name(single: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(single / "checkpoints", folder)
    content = json.loads((folder / "step-4" / manifest.MANIFEST).read_text())
    del content["seal"]
    manifest.write_manifest(folder / "step-4", {**content, "version": 1})
    for resume in ("auto", str(folder / "step-4")):
        with pytest.raises(CheckpointError, match=r"^\S*step-4: MANIFEST\.json is of version 1, not 2$") as caught:
            checkpoints.find(folder, resume, print)
        assert caught.value.exit_code == 4 and "another output_dir" in str(caught.value.hint)
    assert [path.name for path in checkpoints.checkpoints(folder)] == ["step-2", "step-4"]


def test_another_student_is_refused_before_it_is_loaded(single: Path) -> None:
    checkpoint = single / "checkpoints" / "step-2"
    fields = {**manifest.read_manifest(checkpoint)["identity"], "optim.lr": 7}
    checkpoints.require_model(checkpoint, fields)
    with pytest.raises(CheckpointError, match=r"init\.weights was 'loaded' and is now 'random'"):
        checkpoints.require_model(checkpoint, {**fields, "init.weights": "random"})


def test_a_checkpoint_of_zero_3_says_that_it_was_removed(single: Path, tmp_path: Path) -> None:
    shutil.copytree(single / "checkpoints" / "step-2", tmp_path / "step-2")
    content = manifest.read_manifest(tmp_path / "step-2")
    fields = content["identity"]
    manifest.write_manifest(tmp_path / "step-2", {**content, "identity": {**fields, "parallel.zero_stage": 3}})
    with pytest.raises(CheckpointError, match=r"is of a run with parallel\.zero_stage 3, which was removed"):
        checkpoints.require_model(tmp_path / "step-2", fields)


def test_an_older_checkpoint_is_refused_where_newer_ones_would_be_written_again(folder: Path, single: Path) -> None:
    before = outcome(single)
    with pytest.raises(ConfigError, match="has step-4, which a run from step 2 would have to write again"):
        train(runs.resolved(folder, output_dir=str(single)), resume=str(single / "checkpoints" / "step-2"))
    assert outcome(single) == before


def test_a_renamed_checkpoint_is_no_other_step(single: Path, tmp_path: Path) -> None:
    shutil.copytree(single / "checkpoints" / "step-2", tmp_path / "step-3")
    with pytest.raises(CheckpointError, match=r"was renamed, its MANIFEST.json is of step 2"):
        checkpoints.find(tmp_path / "elsewhere", str(tmp_path / "step-3"), print)


@pytest.mark.parametrize("missing", ["step", "identity", "progress", "files", "version"])
def test_a_manifest_that_lacks_something_is_an_error_of_the_checkpoint(
    single: Path, tmp_path: Path, missing: str
) -> None:
    content = manifest.read_manifest(single / "checkpoints" / "step-2")
    del content[missing]
    sealed = {**content, "seal": json_sha256(content)}
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(sealed))
    with pytest.raises(CheckpointError, match=missing):
        manifest.read_manifest(tmp_path)


def test_a_manifest_of_brackets_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / manifest.MANIFEST).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="missing or unreadable"):
        manifest.verify(tmp_path)


def test_what_a_killed_publication_left_goes_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "run" / "final.tmp-0123abcd").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with run_dir.claim(tmp_path / "run"):
        assert not list((tmp_path / "run").glob("final.*"))


@pytest.mark.parametrize("name", [".lock", "command.txt"])
def test_a_link_in_the_run_directory_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "target").write_text("irreplaceable")
    (tmp_path / "run" / name).symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="not a regular file"), run_dir.claim(tmp_path / "run"):
        run_dir.describe(tmp_path / "run", runs.resolved(folder))
    assert (tmp_path / "target").read_text() == "irreplaceable"


def test_what_only_looks_unfinished_stays(tmp_path: Path) -> None:
    mine = [tmp_path / "run" / name for name in ("final.tmp-mine", "step-1.tmp-mine", "step-x.tmp-0123abcd")]
    for path in mine:
        path.mkdir(parents=True)
    with run_dir.claim(tmp_path / "run"):
        checkpoints.remove_unfinished(tmp_path / "run")
    assert all(path.is_dir() for path in mine)


def test_an_output_dir_that_cannot_be_one_is_refused_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("final", "metrics.jsonl"):  # of somebody, and of the names that a run writes
        (tmp_path / f"has {name}" / name).mkdir(parents=True)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "config.json").write_text("{}")  # such as that which the student records
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "final").symlink_to(folder / "student")
    for place, reason in [
        (folder / "student", "is the directory of the model"),
        (tmp_path / "original", "is the directory of a model"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "file" / "below", "is not a directory"),
        (tmp_path / "model", "final is the directory of the model"),
        (tmp_path / "has final", "final is not of a run, and would be replaced"),
        (tmp_path / "has metrics.jsonl", "metrics.jsonl is not of a run, and would be replaced"),
    ]:
        for dry_run in (True, False):
            with pytest.raises(ConfigError, match=reason):
                loop.distill_model(runs.resolved(folder, output_dir=str(place)), dry_run=dry_run)
    assert (tmp_path / "file").read_text() == "mine"
    assert not (folder / "student" / ".lock").exists()


def test_more_steps_than_there_is_memory_for_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a run has at most 2,147,483,648"):
        runs.resolved(folder, train__steps=10**18)


def test_never_does_not_replace_an_earlier_run(folder: Path, single: Path) -> None:
    before = outcome(single)
    with pytest.raises(ConfigError, match="has checkpoints of an earlier run"):
        train(runs.resolved(folder, output_dir=str(single)), resume="never")
    with pytest.raises(CheckpointError, match="atuo: there is no such checkpoint") as caught:
        train(runs.resolved(folder, output_dir=str(single)), resume="atuo")
    assert caught.value.hint is not None and caught.value.hint.startswith("Give auto, never, or")
    assert outcome(single) == before


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    with run_dir.claim(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), run_dir.claim(tmp_path / "run"):
            pass
    with run_dir.claim(tmp_path / "run"):
        pass


def test_a_disk_without_room_for_the_lock_is_named_and_keeps_no_directory(tmp_path: Path) -> None:
    run, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as full, run_dir.claim(run):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (full.value.filename, run.exists()) == (str(run / ".lock"), False)


def test_the_newest_is_newest_by_step_whatever_the_clock_says(finished: tuple[int, Path], tmp_path: Path) -> None:
    shutil.copytree(finished[1] / "checkpoints", tmp_path / "checkpoints")
    os.utime(tmp_path / "checkpoints" / "step-2", (2**31, 2**31))
    assert checkpoints.find(tmp_path / "checkpoints", "auto", print) == tmp_path / "checkpoints" / "step-4"


def test_random_state_goes_through_json() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(1)), random.gauss(0, 1), np.random.normal()

    np.random.normal()
    random.gauss(0, 1)
    saved = json.loads(json.dumps(random_state()))
    first = draw()
    set_random_state(saved)
    assert draw() == first
