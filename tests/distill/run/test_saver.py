"""A full disk: the old checkpoint stays, training goes on, and the run ends only when waiting has no point."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch

from fcsd.config import Checkpoint
from fcsd.distill import loop
from fcsd.distill.inputs import student_source
from fcsd.distill.optim import host_copies
from fcsd.distill.run import checkpoints, manifest, saver, snapshot
from fcsd.distill.student import chosen_parts, least_disk, student_config
from fcsd.errors import DiskError
from fcsd.launch.world import World
from fcsd.parallel.weights.saving import OwnPart


def limited(recipe: Any, first: int, last: int, rank: int, size: int) -> None:
    """A run in which ``rank`` can write no file above ``size`` bytes in the saves ``first`` to ``last``."""
    real, saves = checkpoints.save, 0

    def save(*arguments: Any, **named: Any) -> Path:
        nonlocal saves
        saves += 1
        full = first <= saves <= last and int(os.environ["RANK"]) == rank
        resource.setrlimit(resource.RLIMIT_FSIZE, (size if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return real(*arguments, **named)

    checkpoints.save = save
    loop.distill_model(recipe)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("rank", "overlap"),
    [(1, True), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, False), (0, False), (0, True)))],
)
def test_training_goes_on_when_a_save_finds_no_room(folder: Path, tmp_path: Path, rank: int, overlap: bool) -> None:
    settings = {"every_steps": 1, "keep": 9, "overlap": overlap}
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), checkpoint=settings)
    codes, said = ranks.exit_codes(2, limited, recipe, 2, 3, rank, 100_000)
    assert codes == [0, 0], said
    assert names(tmp_path / "run") == ["step-1", "step-4"]
    assert said.count("the last checkpoint is " + str(tmp_path / "run/checkpoints/step-1") + "; training goes on") == 2


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_that_cannot_save_any_more_stops(folder: Path, tmp_path: Path, overlap: bool) -> None:
    changes = {"checkpoint__every_steps": 1, "checkpoint__overlap": overlap, "faults__save_failures": 1}
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes)
    codes, said = ranks.exit_codes(1, limited, recipe, 2, 9, 0, 100_000)
    assert codes == [7]
    assert names(tmp_path / "run") == ["step-1"]
    assert "step 3 is not saved, the last checkpoint is" in said and "Free some space" in said


def test_the_last_step_must_be_saved(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"))
    assert ranks.exit_codes(1, limited, recipe, 2, 9, 0, 100_000)[0] == [7]
    assert names(tmp_path / "run") == ["step-2"]


def test_room_is_looked_for_before_a_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(manifest, "size", lambda _: 909)
    room = saver.Saver(tmp_path, None, None, {}, None, settings=Checkpoint(keep=1), failures=0, checkpoint=tmp_path)  # type: ignore[arg-type]
    room._require_room()
    monkeypatch.setattr(manifest, "size", lambda _: 910)
    with pytest.raises(DiskError, match="a checkpoint needs") as caught:
        room._require_room()
    assert "start the same command again" in str(caught.value.hint), "a run that this ends makes no next save"


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_whose_disk_cannot_hold_its_result_is_refused_before_its_first_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    changes: dict[str, Any] = {"train__adapter": {"rank": 2}} if adapter else {}
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes)
    source = student_source(recipe.recipe)
    need = least_disk(recipe.recipe, student_config(recipe.recipe, source), chosen_parts(recipe.recipe, source))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": need - 1}))
    for dry_run in (True, False):
        with pytest.raises(DiskError, match=r"GiB, .* are free"):
            loop.distill_model(recipe, dry_run=dry_run)
        assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    runs.train(recipe)
    written = manifest.size(tmp_path / "run/checkpoints/step-4")
    if adapter:
        written += sum(path.stat().st_size for path in (tmp_path / "run/final").glob("*.safetensors"))
    assert 0.5 * written < need <= written, "a run that would fit is never refused"


def test_a_save_is_due_by_steps_or_by_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    hosts = World(0, 1, torch.device("cpu"))

    def dues(**settings: Any) -> list[int]:
        nonlocal now
        now = 1000.0
        mine: Any = saver.Saver(
            tmp_path, None, None, {}, None, settings=Checkpoint(**settings), failures=0, checkpoint=None
        )  # type: ignore[arg-type]
        found = []
        for step in range(1, 13):
            now += 25.0
            if mine.due(step, hosts):
                found.append(step)
                mine._last = now  # as after a save
        return found

    assert dues(every_steps=5) == [5, 10]
    assert dues(every_steps=0) == []
    assert dues(every_steps=0, every_minutes=1.0) == [3, 6, 9, 12]
    assert dues(every_steps=5, every_minutes=1.0) == [3, 5, 8, 10]


def test_a_run_that_saves_by_time_saves(folder: Path, tmp_path: Path) -> None:
    """Every step takes longer than a hundred-thousandth of a minute."""
    recipe = runs.resolved(
        folder, output_dir=str(tmp_path / "run"), checkpoint={"every_steps": 0, "every_minutes": 1e-5, "keep": 9}
    )
    runs.train(recipe, 2)
    assert names(tmp_path / "run") == ["step-1", "step-2", "step-3", "step-4"]


def test_copies_stay_as_they_are_in_memory_that_is_used_again() -> None:
    copies, one, two = host_copies.HostCopies(), torch.ones(3), torch.zeros(2, 2, dtype=torch.bfloat16)
    places = []
    for _ in range(2):
        copies.restart()
        mine = [copies.copy(one), copies.copy(two)]
        copies.wait()
        expected = [one.clone(), two.clone()]
        one += 1
        two -= 1
        assert all(torch.equal(*pair) for pair in zip(mine, expected, strict=True))
        places.append([copy.data_ptr() for copy in mine])
    assert places[0] == places[1]
    copies.restart()
    assert copies.copy(torch.ones(5)).shape == (5,)


def test_a_snapshot_is_copied_when_its_copies_have_arrived() -> None:
    class Late(host_copies.HostCopies):
        """Copies that the device makes while the host waits."""

        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            self.pairs = [*getattr(self, "pairs", []), (torch.zeros_like(tensor), tensor)]
            return self.pairs[-1][0]

        def wait(self) -> None:
            for mine, tensor in self.pairs:
                mine.copy_(tensor)

    part: Any = OwnPart(None, {}, lambda: iter([("weight", torch.ones(3), None)]), 1)  # type: ignore[arg-type]
    found = snapshot.copied(snapshot.Snapshot(part, {"moment": torch.ones(2)}, {}), Late())
    ((_, weight, _),) = found.part.tensors()
    assert weight.tolist() == [1, 1, 1] and found.optimizer["moment"].tolist() == [1, 1]


def test_without_memory_for_a_copy_the_run_waits_for_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, settings, taken = World(0, 1, torch.device("cpu")), Checkpoint(overlap=True), Any
    monkeypatch.setattr(saver.snapshot, "host_bytes", lambda _: 2**30)
    for free, overlaps in [(2**31, True), (2**30, False)]:
        monkeypatch.setattr(host_copies, "free_memory", lambda free=free: free)
        mine: Any = saver.Saver(tmp_path, alone, None, {}, None, settings=settings, failures=0, checkpoint=None)  # type: ignore[arg-type]
        assert [mine._overlaps(taken), mine._overlaps(taken)] == [overlaps] * 2
        mine.close()
        warnings = capsys.readouterr().err.count("takes 1.00 GiB of host memory for each process, which is not free")
        assert warnings == (not overlaps)
