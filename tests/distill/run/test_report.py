"""What a run says of itself: how far it goes, where it saves, how it is resumed, and when it will end."""

import sys
from pathlib import Path

import pytest
import runs

from fcsd.distill.run import report


def test_a_run_says_where_it_saves_and_what_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fcsd", "distill", "my recipe.yaml", "--gpus", "2"])
    recipe = runs.resolved(tmp_path, checkpoint={"every_steps": 50, "every_minutes": 30.0}).recipe
    assert report.opening(recipe, tmp_path, 2).splitlines() == [
        "The run takes steps 3 to 4. It saves every 50 steps and every 30 minutes and at the end "
        f"to {tmp_path / 'checkpoints'}.",
        "If it is interrupted, resume it with: fcsd distill 'my recipe.yaml' --gpus 2",
    ]


def test_every_line_says_when_the_run_will_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    with report.reporting(tmp_path, runs.resolved(tmp_path, train__steps=100), start=20) as reporter:
        now = 600.0
        reporter.log({"step": 30, "loss": 1.0})
        reporter.log({"step": 100, "loss": 1.0})
    said = capfd.readouterr().err
    assert "30% of 100 steps, ends in 1 h 10 min, at 2" in said
    assert said.rstrip().endswith("100% of 100 steps")
