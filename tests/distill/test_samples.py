"""Answers to fixed prompts during training: they are there, of both models, and training does not notice."""

import json
from pathlib import Path
from typing import Any

import pytest
import runs

from fcsd.serve.chat import PROMPTS, answer, load_speaker


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def states(run: Path) -> list[bytes]:
    """The random state in every checkpoint, of every rank."""
    return [path.read_bytes() for path in sorted((run / "checkpoints").glob("step-*/rank-*.json"))]


@pytest.mark.parametrize("changes", [{}, pytest.param({"parallel__ep_size": 2}, marks=pytest.mark.nightly)])
def test_samples_are_the_models_answers_and_leave_no_trace(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with_samples, without = tmp_path / "with", tmp_path / "without"
    changes = {"train__eval_every": 2, "train__activation_checkpointing": True, **changes}
    sampled = runs.resolved(folder, output_dir=str(with_samples), train__sample_tokens=6, **changes)
    runs.train_all([sampled, runs.resolved(folder, output_dir=str(without), **changes)], 2)
    assert runs.outcome(with_samples) == runs.outcome(without)
    assert states(with_samples) == states(without) and len(states(without)) == 4
    assert not (without / "samples.jsonl").exists()
    found = lines(with_samples)
    assert [(line["step"], line["prompt"]) for line in found] == [(step, p) for step in (2, 4) for p in PROMPTS]
    for name, path in (("teacher", folder / "teacher"), ("student", with_samples / "final")):
        speaker = load_speaker(str(path))
        expected = [answer(speaker, [{"role": "user", "content": p}], seed=None, max_new_tokens=6) for p in PROMPTS]
        assert [line[name] for line in found[-len(PROMPTS) :]] == expected
    assert [line["teacher"] for line in found[: len(PROMPTS)]] == [line["teacher"] for line in found[len(PROMPTS) :]]


def test_a_resumed_run_has_each_sample_once(folder: Path, tmp_path: Path) -> None:
    changes = {"train__eval_every": 1, "train__sample_tokens": 1, "objective__kl": 0.0, "output_dir": str(tmp_path)}
    runs.train(runs.resolved(folder, train__steps=2, optim__horizon=4, **changes))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prompt": "of a step that was lost"}\n{"step"')
    runs.train(runs.resolved(folder, optim__horizon=4, **changes))
    assert [line["step"] for line in lines(tmp_path)] == [step for step in (1, 2, 3, 4) for _ in PROMPTS]
    assert all("teacher" not in line for line in lines(tmp_path))  # nobody else needs one
