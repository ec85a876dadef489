"""The study of training through the wire: its runs are recipes, and its table follows from the runs that ended."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from studies.formats import training as wire_study
from studies.formats.training import Case, Settings, cases, overrides, table

from fcsd.config.resolve import load_recipe

pytestmark = pytest.mark.lab

SETTINGS = Settings("tiny", "gradients", ("train.steps=7", "optim.warmup_steps=1"), (), None)


def _ended(case: Case, kl: float, score: float | None = None) -> dict[str, Any]:
    scores = {} if score is None else {"PIQA": {"value": score}, "WG": {"value": score - 0.1}}
    return {**case._asdict(), "held_out_kl": kl, "scores": scores}


def _row(found: str, place: int) -> list[str]:
    return [cell.strip() for cell in found.splitlines()[2 + place].strip("|").split("|")]


def test_the_runs_of_a_seed_come_before_those_of_the_next() -> None:
    found = cases(["bf16", "int4:g128"], ["all", "forward"], [0, 1])
    assert found[:3] == [Case("bf16", "all", 0), Case("int4:g128", "all", 0), Case("int4:g128", "forward", 0)]
    assert [case.seed for case in found] == [0, 0, 0, 1, 1, 1]
    assert len({case.name for case in found}) == 6 and ":" not in found[1].name


def test_a_format_is_free_within_the_spread_of_bf16() -> None:
    runs = []
    for seed, (exact, int8, int4) in enumerate([(0.10, 0.11, 0.20), (0.12, 0.12, 0.21)]):
        runs += [_ended(Case("bf16", "all", seed), exact, 0.8 + 0.1 * seed)]
        runs += [_ended(Case("int8", "all", seed), int8, 0.8), _ended(Case("int4:g128", "forward", seed), int4, 0.8)]
    runs.append(_ended(Case("int8", "all", 2), 0.13, 0.8))  # of a seed that bf16 does not have yet
    found = table(runs)
    assert _row(found, 0) == ["`bf16`", "-", "16", "2", "0.11000", "spread 0.02000", "80.00", "spread 10.00", "-"]
    expected = ["`int8`", "all", "8.25", "3", "0.12000", "+0.00500 ± 0.00500", "75.00", "-5.00 ± 5.00", "yes"]
    assert _row(found, 1) == expected
    assert _row(found, 2)[1:3] == ["forward", "4.25"] and _row(found, 2)[-1] == "no"


def test_a_format_whose_scores_fall_is_not_free() -> None:
    runs = [_ended(Case("bf16", "all", seed), 0.1 + seed, 0.9) for seed in (0, 1)]
    runs += [_ended(Case("int5", "all", seed), 0.1 + seed, 0.8) for seed in (0, 1)]
    assert _row(table(runs), 1)[-1] == "no"
    assert _row(table([{**run, "scores": {}} for run in runs]), 1)[-3:] == ["-", "-", "yes"]


def test_every_run_is_a_recipe_that_is_taken(tmp_path: Path) -> None:
    for case, expected in (
        (Case("bf16", "all", 1), {}),
        (Case("int4", "all", 1), dict.fromkeys(("dispatch", "combine", "dispatch_grad", "combine_grad"), "int4")),
        (Case("int8", "forward", 1), dict.fromkeys(("dispatch", "combine"), "int8")),
    ):
        recipe = load_recipe("tiny", overrides(SETTINGS, tmp_path, case)).recipe
        wire = recipe.parallel.quantised.model_dump()
        assert wire.pop("stochastic") == ("gradients" if len(expected) == 4 else "off")
        assert {direction: format for direction, format in wire.items() if format} == expected
        assert (recipe.seed, recipe.train.steps, recipe.model) == (1, 7, str(tmp_path))


def test_a_study_trains_scores_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run of one step in a worker; the same command then repeats nothing, and other options are refused."""
    words = ["wire_study.py", str(tmp_path / "out"), "--formats", "int4", "--directions", "forward", "--seeds", "3"]
    words += ["--limit", "2", "--tasks", "piqa", "--set", "train.steps=1", "optim.warmup_steps=0"]
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "' + "A held-out text. " * 200 + '"}\n')
    words += [f"data.held_out.path={text}", "train.batch_tokens=256", "train.micro_batch_size=1"]
    words.append("train.sample_tokens=0")
    monkeypatch.setattr(sys, "argv", words)
    assert wire_study.main() == 0
    stored = (tmp_path / "out" / wire_study.RESULT).read_text()
    (run,) = json.loads(stored)["runs"]
    assert Case(run["format"], run["directions"], run["seed"]) == Case("int4", "forward", 3)
    assert run["steps"] == 1 and run["held_out_kl"] > 0 and run["scores"]["PIQA"]["n"] == 2
    assert "`int4`" in capsys.readouterr().out
    monkeypatch.setattr(wire_study, "train", None)
    assert wire_study.main() == 0 and (tmp_path / "out" / wire_study.RESULT).read_text() == stored
    monkeypatch.setattr(sys, "argv", [*words, "--stochastic", "all"])
    with pytest.raises(SystemExit, match="other settings"):
        wire_study.main()
