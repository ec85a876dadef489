"""What metrics.jsonl says of speed, memory and communication."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from test_trace import EVENTS, computed, write

from fcsd.distill.metrics import exposed_communication, full_speed, gpu_peak
from fcsd.distill.run.report import read_metrics
from fcsd.plan.speed import PEAK
from fcsd.serve.chat import load_speaker


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


@pytest.mark.nightly
def test_a_profiled_step_computes_the_same_and_leaves_a_trace(folder: Path, tmp_path: Path) -> None:
    parallel = {"parallel__ep_size": 2}
    for name, changes in {"plain": parallel, "traced": {**parallel, "train__trace_every": 2}}.items():
        runs.train(runs.resolved(folder, output_dir=str(tmp_path / name), **changes), 2)
    assert runs.outcome(tmp_path / "traced") == runs.outcome(tmp_path / "plain")
    traces = sorted(str(path.relative_to(tmp_path / "traced")) for path in tmp_path.glob("traced/traces/*/*"))
    assert traces == [f"traces/step-{step}/rank-{rank}.json.gz" for step in (2, 4) for rank in (0, 1)]
    events = json.loads(gzip.decompress((tmp_path / "traced" / traces[0]).read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
    students = names.count("fcsd::dispatch.bwd.L1")  # the teacher has no backward pass
    assert names.count("fcsd::dispatch.fwd.L1") == 2 * students > 0, "the student's and the teacher's"


def test_exposed_is_what_no_computation_covers(tmp_path: Path) -> None:
    found = exposed_communication(write(tmp_path / "t.json", EVENTS))
    assert found == {"exposed_communication_ms": pytest.approx(0.04), "hidden_communication": pytest.approx(3 / 7)}
    assert exposed_communication(write(tmp_path / "cpu.json", computed(0, 1, 1))) == {}
