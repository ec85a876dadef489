"""What a run says of itself: how far it goes, where it saves, how it is resumed, and when it will end."""

import json
import resource
import sys
from pathlib import Path

import pytest
import runs
from ranks import exit_codes

from fcsd.config.recipe import pauses
from fcsd.distill.loop import distill_model
from fcsd.distill.run import report
from fcsd.distill.run.report import TimeLeft


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
    monkeypatch.setattr(report, "TimeLeft", lambda *given: TimeLeft(*given, clock=lambda: now))
    with report.reporting(tmp_path, runs.resolved(tmp_path, train__steps=100), start=20) as reporter:
        with reporter.pause("checkpoint", "saving step 20"):
            pass
        now = 600.0
        reporter.log({"step": 30, "loss": 1.0})
        reporter.log({"step": 100, "loss": 1.0})
    said = capfd.readouterr().err
    assert "30% of 100 steps, ends in 1 h 10 min, at 2" in said
    assert said.rstrip().endswith("100% of 100 steps")


def test_a_disk_without_room_for_a_record_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with report.reporting(tmp_path, runs.resolved(tmp_path), start=0) as reporter:
        reporter.log({"step": 1})
        metrics = tmp_path / report.METRICS
        resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 3, before[1]))
        try:
            reporter.log({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        reporter.log({"step": 3})
    assert [line["step"] for line in report.read_metrics(tmp_path)] == [1, 3]
    assert f"warning: a file may not grow so large: {metrics}; nothing is added" in capsys.readouterr().err


def test_pauses_are_named_and_counted_in_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step takes 10 s. An evaluation has 5120 tokens, the step 256; a save takes 30 s."""
    now = 0.0
    monkeypatch.setattr(report, "TimeLeft", lambda *given: TimeLeft(*given, clock=lambda: now))
    changes = {"train__eval_every": 4, "train__sample_tokens": 8, "checkpoint__every_steps": 5}
    recipe = runs.resolved(tmp_path, train__steps=10, **changes)
    with report.reporting(tmp_path, recipe, start=0, held_out_tokens=5120) as reporter:
        now = 10.0
        reporter.log({"step": 1})  # 9 steps, and 3 evaluations of 200 s
        now = 40.0
        for kind, seconds in (("held-out loss", 100.0), ("samples", 60.0)):
            with reporter.pause(kind, f"now {kind}"):
                now += seconds
        reporter.log({"step": 4})  # 6 steps, 2 evaluations of 160 s, and 2 saves
        now += 10.0
        for _ in range(2):
            with reporter.pause("checkpoint", "saving"):
                now += 30.0
        reporter.log({"step": 5})  # 5 steps, 2 evaluations, 2 saves, one of which was just now
        for _ in range(3):
            with reporter.pause("score", "scoring"):
                pass
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("ends in 12 min and what was not timed yet: samples, checkpoint")
    assert lines[1:3] == ["now held-out loss ...", "now samples ..."]
    assert lines[3].endswith("ends in 6 min and what was not timed yet: checkpoint")
    assert lines[4:6] == ["saving ...", "saving ..."]
    assert ", ends in 7 min, at 2" in lines[6]
    assert lines[7:] == ["scoring ..."], "it takes less than a second, and is named once"


@pytest.mark.parametrize("every", [(0, 0), (3, 0), (4, 6), (5, 1), (7, 7), (0, 12)])
def test_pauses_are_counted_without_going_through_the_steps(every: tuple[int, int]) -> None:
    for after in range(12):
        due = [n for n in range(after + 1, 13) if n == 12 or any(each and n % each == 0 for each in every)]
        assert pauses(after, 12, *every) == len(due)


def test_a_run_names_what_it_does_between_its_steps(tmp_path: Path) -> None:
    teacher, student = runs.write_models(tmp_path, "llama")
    recipe = runs.resolved(tmp_path, train__steps=1, train__sample_tokens=2, optim__warmup_steps=0)
    codes, said = exit_codes(1, distill_model, recipe)
    assert codes == [0], said
    order = [  # other libraries may write between these
        "reading the text ...\n",
        f"loading {student} ...\n",
        f"loading the teacher {teacher} ...\n",
        "measuring the held-out loss of step 1, ",
        "writing samples of step 1 ...",
        "step 1  tokens",
        "saving step 1 ...",
    ]
    places = [said.index(text) for text in order]
    assert places == sorted(places)


def test_the_end_of_a_run_says_what_its_text_does(tmp_path: Path) -> None:
    """A text that only the teacher's own divergence rises on is warned of; a run without held-out text says nothing."""

    def told(*records: dict) -> str:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return report.closing(tmp_path)

    first = {"step": 10, "held_out_kl": 0.5, "held_out_sft": 2.0, "held_out_own_kl": 0.25, "held_out_own_sft": 3.0}
    assert told({"step": 10, "loss": 1.0}) == ""
    fell = told(first, {**first, "step": 20, "held_out_kl": 0.4, "held_out_own_kl": 0.2})
    assert fell == "held-out KL, after the last step: 0.4 on data.held_out, 0.2 on text that the teacher wrote"
    rose = told(first, {**first, "step": 20, "held_out_kl": 0.4, "held_out_own_kl": 0.3})
    assert "0.3 on text that the teacher wrote (lowest at step 10: 0.25)\nwarning: only" in rose
    both = told(first, {**first, "step": 20, "held_out_kl": 0.6, "held_out_own_kl": 0.3})
    assert "0.6 on data.held_out (lowest at step 10: 0.5)" in both and "warning" not in both
    assert told({"step": 5, "held_out_sft": 1.5}) == "held-out cross-entropy, after the last step: 1.5 on data.held_out"
