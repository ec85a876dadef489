"""Answers to fixed prompts during training: they are there, of both models, and training does not notice."""

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from fcsd.chat import PROMPTS, answer, load_speaker
from fcsd.distill.meter import full_speed, gpu_peak
from fcsd.plan.speed import PEAK
from fcsd.report import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    runs.write_models(folder)
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def states(run: Path) -> list[bytes]:
    """The random state in every checkpoint, of every rank."""
    return [path.read_bytes() for path in sorted((run / "checkpoints").glob("step-*/rank-*.json"))]


@pytest.mark.parametrize("changes", [{}, pytest.param({"train__expert_parallel": 2}, marks=pytest.mark.nightly)])
def test_samples_are_the_models_answers_and_leave_no_trace(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with_samples, without = tmp_path / "with", tmp_path / "without"
    changes = {"train__eval_every": 2, "train__activation_checkpointing": True, **changes}
    runs.train(runs.resolved(folder, output_dir=str(without), **changes), 2)
    runs.train(runs.resolved(folder, output_dir=str(with_samples), train__sample_tokens=6, **changes), 2)
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
    runs.train(runs.resolved(folder, train__steps=2, train__horizon=4, **changes))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prompt": "of a step that was lost"}\n{"step"')
    runs.train(runs.resolved(folder, train__horizon=4, **changes))
    assert [line["step"] for line in lines(tmp_path)] == [step for step in (1, 2, 3, 4) for _ in PROMPTS]
    assert all("teacher" not in line for line in lines(tmp_path))  # nobody else needs one


def test_every_record_has_every_term_and_what_it_took(folder: Path, tmp_path: Path) -> None:
    changes = {"objective__hidden": {"weight": 0.1}, "train__steps": 2, "output_dir": str(tmp_path)}
    runs.train(runs.resolved(folder, **changes), 2)
    for line in read_metrics(tmp_path):
        assert line["loss"] == pytest.approx(line["kl"] + 0.5 * line["sft"] + 0.1 * line["hidden"])
        assert min(line["grad_norm"], line["tokens_per_second"], line["seconds"]) > 0
        assert 0.05 < line["peak_host_memory_gib"] < 64
        assert "mfu" not in line and "peak_memory_gib" not in line, "there is no GPU here"


def test_full_speed_is_six_flops_a_weight_and_two_of_the_teacher(folder: Path) -> None:
    """In rows of two tokens attention to earlier ones is next to nothing; what is left is counted by hand."""
    recipe = runs.resolved(folder, data__seq_len=2, train__activation_checkpointing=True).recipe
    before = torch.get_rng_state()
    per_token = 2 * 1e12 / full_speed(recipe, 2, 1e12)
    assert torch.equal(torch.get_rng_state(), before)
    model: Any = load_speaker(str(folder / "teacher")).model
    config = model.config
    weights = model.num_parameters() - model.get_input_embeddings().weight.numel()
    idle = 1 - config.num_experts_per_tok / config.n_routed_experts
    weights -= idle * sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert per_token == pytest.approx(8 * weights, rel=0.05)
    alone = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"kl": 0.0})})
    assert 2 * 1e12 / full_speed(alone, 2, 1e12) == pytest.approx(6 / 8 * per_token)


def test_peaks_are_known_by_the_names_of_gpus() -> None:
    assert gpu_peak("NVIDIA H200", "bf16") == gpu_peak("NVIDIA H100 80GB HBM3", "bf16") == PEAK["bf16"]
    assert gpu_peak("NVIDIA H100 PCIe", "bf16") is None
