"""``train.draft_head``: the loss on packed rows, whole runs, their resume, what they write, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import tiny
import torch
from benchmarks.vllm.speculation import eagle_head
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaModel

from fcsd.checkpoint import open_checkpoint, read_layout, whole_sha256
from fcsd.config import Objective
from fcsd.distill.data.rows import batch
from fcsd.distill.draft import Drafting, start_head
from fcsd.distill.loop import distill_model
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.run.report import read_metrics
from fcsd.distill.teacher.targets import LiveTeacher
from fcsd.errors import BadInputError, ConfigError
from fcsd.export.final import export_model
from fcsd.models.draft_head import DraftHead
from fcsd.plan import Hardware, plan_run
from fcsd.plan.report import to_text
from fcsd.plan.speed import forward_flops

ARCH = "qwen3_moe"
HEAD: dict[str, Any] = {"train__draft_head": True, "objective__sft": 0.5}


def literal(model: Any, head: DraftHead, ids: Tensor) -> Tensor:
    """The summed divergence on one document, by transformers' llama, without packing and chunks."""
    llama: Any = LlamaModel(head.config).double()
    llama.layers[0] = head.layers[0]
    llama.norm = nn.Identity()
    hidden = model.model(ids[None]).last_hidden_state
    x = F.linear(torch.cat((model.get_input_embeddings().weight[ids[1:]], hidden[0, :-1]), -1), head.fc.weight)
    head.config._attn_implementation = "sdpa"
    guessed = llama(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, :-1]
    head.config._attn_implementation = "packed"
    log_p, log_q = (model.lm_head(states).log_softmax(-1) for states in (guessed, hidden[0, 1:-1]))
    return (log_q.exp() * (log_q - log_p)).sum()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_loss_on_packed_rows_is_that_of_their_documents_alone(arch: str) -> None:
    model = tiny.model(arch, initializer_range=0.1, dtype=torch.float64).requires_grad_(False)
    lengths, rows = [[7, 1, 2, 14], [24]], tiny.tokens(2, 24)
    places = [np.concatenate([np.arange(length) for length in row]) for row in lengths]
    packed = [(ids.numpy(), own, np.ones(24, dtype=np.bool_)) for ids, own in zip(rows, places, strict=True)]
    columns, head = batch(packed, range(2), drafts=True), start_head(model, 0)
    drafting, source = Drafting(head, model, Objective()), LiveTeacher(model, Objective())
    documents = [ids for row, own in zip(rows, lengths, strict=True) for ids in row.split(own)]
    count = (columns["labels"] != IGNORE).sum()
    assert count == sum(max(0, len(ids) - 2) for ids in documents)
    found = drafting(columns, source.get_targets(columns), count, ("kl",))["kl"]
    own = torch.autograd.grad(found, list(head.parameters()))
    expected = torch.stack([literal(model, head, ids) for ids in documents if len(ids) > 2]).sum() / count
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(own, torch.autograd.grad(expected, list(head.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """The directory of a run of four steps beside a converted model with experts."""
    before = whole_sha256(read_layout(folder / "student"))
    runs.train(runs.resolved(folder, output_dir=str(folder / "draft"), **HEAD, train__eval_every=2))
    assert whole_sha256(read_layout(folder / "student")) == before
    return folder / "draft"


def test_final_is_what_vllm_loads_and_the_loss_falls(folder: Path, finished: Path, tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama", head_dim=16, vocab_size=len(runs.texts.tokenizer()))
    eagle_head(tmp_path / "teacher", tmp_path / "eagle")  # vLLM has loaded such a one
    wanted, found = (load_file(path / "model.safetensors") for path in (tmp_path / "eagle", finished / "final"))
    assert found.keys() == wanted.keys()
    config = json.loads((finished / "final" / "config.json").read_text())
    target = json.loads((folder / "student" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 1)
    assert all(config[name] == target[name] for name in ("vocab_size", "hidden_size", "head_dim"))
    assert sorted(path.name for path in (finished / "final").iterdir()) == ["config.json", "model.safetensors"]
    losses = [line["held_out_kl"] for line in read_metrics(finished) if "held_out_kl" in line]
    assert losses[-1] < losses[0]
    with pytest.raises(BadInputError, match="unexpected") as refused:
        open_checkpoint(finished / "final").verify()
    assert "--speculative-config" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="draft head"):
        export_model(finished, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{}, {"train__dtype": "bf16", "parallel__zero_stage": 2}])
def test_a_resumed_run_has_the_same_bits(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = {**HEAD, **changes}
    runs.train(runs.resolved(folder, output_dir=str(tmp_path / "run"), **recipe))
    resumed = runs.cut_short(tmp_path / "run", tmp_path / "resumed")
    runs.train(runs.resolved(folder, output_dir=str(resumed), **recipe))
    assert runs.outcome(resumed) == runs.outcome(tmp_path / "run")


def alike(one: Path, other: Path) -> None:
    """Two runs agree up to rounding in fp32."""
    mine, theirs = runs.numbers(one), runs.numbers(other)
    for line, reference in zip(mine[0], theirs[0], strict=True):
        assert line == pytest.approx(reference, rel=2e-5)
    for name, weight in theirs[1].items():
        torch.testing.assert_close(mine[1][name], weight, rtol=1e-5, atol=1e-5)


def test_divided_experts_train_the_head_of_one_process(folder: Path, finished: Path, tmp_path: Path) -> None:
    changes = {**HEAD, "train__eval_every": 2, "parallel__ep_size": 2}
    runs.train(runs.resolved(folder, output_dir=str(tmp_path / "two"), **changes), 2)
    alike(tmp_path / "two", finished)


def test_sharded_layers_train_the_head_of_one_process(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama")
    runs.train(runs.resolved(tmp_path, output_dir=str(tmp_path / "one"), **HEAD))
    runs.train(runs.resolved(tmp_path, output_dir=str(tmp_path / "two"), **HEAD, parallel__tp_size=2), 2)
    alike(tmp_path / "two", tmp_path / "one")
    one = runs.cut_short(tmp_path / "two", tmp_path / "continued by one")
    runs.train(runs.resolved(tmp_path, output_dir=str(one), **HEAD))
    alike(one, tmp_path / "one")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": {"wiring": "ladder"}}, "init.wiring"),
        ({"teacher": "teacher"}, "with teacher: the model itself"),
        ({"optim__train": ["norms"]}, "optim.train"),
        ({"objective__hidden": {"weight": 1.0}}, "objective.hidden.weight"),
        ({"early_stop": {"metric": "mbpp_plus"}}, "early_stop.metric"),
    ],
)
def test_what_a_head_does_not_go_with_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.resolved(folder, **{**HEAD, **changes})


def test_a_model_that_vllm_would_serve_otherwise_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "gemma2")
    recipe = runs.resolved(tmp_path, **HEAD)
    with pytest.raises(ConfigError, match="logits"):
        distill_model(recipe)
    with pytest.raises(ConfigError, match="logits"):
        plan_run(recipe.recipe, Hardware(1))
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_one_pass_and_the_head(folder: Path, finished: Path) -> None:
    recipe = runs.resolved(folder, **HEAD).recipe
    planned = plan_run(recipe, Hardware(1))
    trained = sum(value.numel() for value in load_file(finished / "final" / "model.safetensors").values())
    assert planned.setup.parts is not None and planned.setup.parts.trained == trained
    assert planned.memory.peak.weights == 4 * (planned.numbers.total + trained) and planned.memory.peak.teacher == 0
    saved = sum(path.stat().st_size for path in (finished / "checkpoints" / "step-4").rglob("*") if path.is_file())
    assert planned.disk == pytest.approx(3 * saved + 4 * trained, rel=0.1)
    layers, output = forward_flops(planned.numbers, 32)  # the latter twice forward, and once backward
    assert planned.speed.flops == pytest.approx(layers + 3 * output + 6 * trained, rel=1e-3)
    assert "draft head" in to_text(planned)
