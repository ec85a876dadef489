"""Trackers: what they are sent, and that none of them can stop a run."""

import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fcsd import extras
from fcsd.distill import loop
from fcsd.distill.run.report import read_metrics, reporting
from fcsd.distill.run.trackers import tracking
from fcsd.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def log(folder: Path, report: str, start: int, steps: list[int]) -> None:
    with reporting(folder / "run", runs.resolved(folder, report__to=report), start=start) as reporter:
        for step in steps:
            reporter.log({"step": step, "loss": 1.0 / step, "grad_norm": float("nan") if step == 2 else 0.5})


def test_tensorboard_has_every_metric_once(tmp_path: Path, run: Path) -> None:
    log(tmp_path, "tensorboard", 0, [1, 2, 3])
    log(tmp_path, "tensorboard", 2, [3, 4])  # the end of the first attempt is replaced
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "grad_norm"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25),
    ]  # fmt: skip
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]


def test_trackio_is_called_as_it_asks_to_be(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
            calls.append((step, metrics["loss"]))

        def finish(self) -> None:
            calls.append("finish")

    def init(project: str, name: str | None = None, *, config: dict | None = None, resume: str = "never") -> Run:
        assert config is not None and config["optim"]["lr"] == 1e-3
        calls.append((project, name, resume))
        print("a banner")
        return Run()

    double = ModuleType("trackio")
    double.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", double)
    log(tmp_path, "trackio", 0, [1])
    log(tmp_path, "trackio", 1, [2])
    name = calls[0][1]
    assert name.startswith("test-")
    first, second = (("fcsd", name, "allow"), (1, 1.0), "finish"), (("fcsd", name, "allow"), (2, 0.5), "finish")
    assert calls == [*first, *second]
    assert capsys.readouterr().out == "", "stdout is for data"


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_does_not_stop_the_run(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    class Run:
        def __init__(self, **_: Any) -> None:
            self._reach("init")

        def _reach(self, point: str) -> None:
            if point == fails:
                raise socket.gaierror(-3, "no such host")

        def log(self, metrics: dict[str, Any], step: int) -> None:
            self._reach("log")

        def finish(self) -> None:
            self._reach("finish")

    double = ModuleType("trackio")
    double.init = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", double)
    log(tmp_path, "trackio", 0, [1, 2, 3])
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3] and (run / "curves.png").exists()
    assert capsys.readouterr().err.count("warning: trackio: [Errno -3] no such host; the run goes on without it") == 1


def test_wandb_gets_project_and_tags(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    double = ModuleType("wandb")
    double.init = lambda **options: given.update(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", double)
    report = {"to": "wandb", "project": "mine", "tags": ["first", "small"]}
    with tracking(run, runs.resolved(tmp_path, report=report).recipe, start=0):
        pass
    assert (given["project"], given["tags"], given["resume"]) == ("mine", ["first", "small"], "allow")


def test_an_error_of_the_run_is_not_taken_for_the_trackers(tmp_path: Path, run: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        tracking(run, runs.resolved(tmp_path, report__to="tensorboard").recipe, start=0),
    ):
        raise ZeroDivisionError


def test_wandb_continues_a_run_under_its_id(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log(tmp_path, "wandb", 0, [1])
    log(tmp_path, "wandb", 1, [2])
    # offline-run-TIME-ID, and a number behind it where both begin in the same second
    names = [path.name.split("-")[3] for path in (run / "wandb").glob("offline-run-*")]
    assert len(names) == 2 and set(names) == {(run / "tracker_id").read_text()}


def test_a_package_that_is_missing_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    recipe = runs.resolved(tmp_path, report__to="trackio", model="no/such/model")
    with pytest.raises(ConfigError, match=r"^report.to trackio needs trackio: pip install 'fcsd\[track\]'$"):
        loop.distill_model(recipe)
    assert (
        json.loads((tmp_path / "recipe.yaml").read_text())["report"]["to"] == "trackio"
        and not (tmp_path / "run").exists()
    )
