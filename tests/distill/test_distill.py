"""Whole runs through the DeepSpeed engine: equal to plain torch, whatever the ranks, stages and micro-batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import texts
import torch
import transformers
from safetensors.torch import load_file

from fcsd.distill import loop
from fcsd.distill.data.corpus import load_corpus, load_tokenizer
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.data.rows import batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.preview import preview
from fcsd.distill.run.identity import differences, run_identity
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step import one_step as step
from fcsd.distill.teacher import targets
from fcsd.errors import BadInputError, CheckpointError, ConfigError, NonFiniteError
from fcsd.launch.world import World
from fcsd.models.build import load_model


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A teacher, its conversion and a corpus."""
    runs.resolved(folder)
    return folder


def train(folder: Path, out: Path, size: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """The metrics of a run in ``size`` fresh processes."""
    recipe = runs.resolved(folder, output_dir=str(out), **changes)
    ranks.results(size, loop.distill_model, recipe)
    return read_metrics(out)


def plain_torch(folder: Path, **changes: Any) -> list[float]:
    """The losses of ``runs.resolved`` without engine, chunks, micro-batches or ranks."""
    recipe = runs.resolved(folder, **changes).recipe
    student, teacher = load_model(folder / "student").train(), load_model(folder / "teacher")
    tokenizer = load_tokenizer(folder / "student")
    rows = training_rows(recipe, [load_corpus(source, tokenizer, 256) for source in recipe.data.sources])
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for number in range(recipe.train.steps):
        data = batch(rows, range(8 * number, 8 * number + 8))
        keep, labels = data["labels"] != IGNORE, data.pop("labels")
        logits, wanted = (model(**data, use_cache=False).logits[keep] for model in (student, teacher))
        kl = (wanted.softmax(-1) * (wanted.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()
        loss = kl + 0.5 * torch.nn.functional.cross_entropy(logits, labels[keep])
        optimizer.param_groups[0]["lr"] = step.learning_rate(recipe, number + 1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def chats_and_text(folder: Path) -> list[dict[str, Any]]:
    """Sources in equal parts; rows of chats count few tokens, each another number."""
    texts.write_jsonl(folder / "chats.jsonl", [texts.chat(f"{n}?", "yes " * (n % 5 + 1)) for n in range(40)], "chat")
    (folder / "template.jinja").write_text(texts.PLAIN)
    chats = {"path": str(folder / "chats.jsonl"), "messages": "chat", "chat_template": str(folder / "template.jinja")}
    return [{"path": str(folder / "corpus.jsonl")}, chats]


@pytest.mark.parametrize(
    ("size", "stage", "micro", "chats"), [(1, 0, 8, False), (2, 1, 2, False), (2, 2, 1, False), (2, 2, 2, True)]
)
def test_a_run_equals_plain_torch(folder: Path, tmp_path: Path, size: int, stage: int, micro: int, chats: bool) -> None:
    changes = {"data__sources": chats_and_text(folder)} if chats else {}
    metrics = train(
        folder, tmp_path / "run", size, parallel__zero_stage=stage, train__micro_batch_size=micro, **changes
    )
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["loss"] for m in metrics] == pytest.approx(plain_torch(folder, **changes), rel=1e-5)
    assert all(m["grad_norm"] > 0.5 for m in metrics)


def test_a_run_leaves_what_the_next_command_needs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks.DRAW_CURVES, "1")
    run = tmp_path / "run"
    runs.resolved(folder)  # writes the corpus
    (tmp_path / "own.jsonl").write_text("".join((folder / "corpus.jsonl").read_text().splitlines(keepends=True)[:3]))
    own = {"path": str(tmp_path / "own.jsonl")}
    changes = {"train__activation_checkpointing": True, "data__held_out_own": own}
    metrics = train(folder, run, **changes)
    assert metrics[-1]["held_out_kl"] > 0 and metrics[-1]["held_out_sft"] > 0
    assert 0 < metrics[-1]["held_out_own_kl"] != metrics[-1]["held_out_kl"]
    assert {"config.resolved.yaml", "env.json", "command.txt", "curves.png", "final"} <= {
        path.name for path in run.iterdir()
    }
    versions = json.loads((run / "env.json").read_text())["packages"]
    assert torch.__version__.startswith(versions["torch"])  # some builds name CUDA in one of the two only
    assert (
        runs.load_recipe(run / "config.resolved.yaml").recipe
        == runs.resolved(folder, output_dir=str(run), **changes).recipe
    )
    trained, before = load_model(run / "final"), load_file(folder / "student" / "model.safetensors")
    assert type(trained) is type(load_model(folder / "student"))
    after = load_file(run / "final" / "model.safetensors")
    assert after.keys() == before.keys()
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert transformers.AutoTokenizer.from_pretrained(run / "final").eos_token == "<eos>"


def twice(*recipes: Any) -> None:
    for recipe in recipes:
        loop.distill_model(recipe)


def test_two_runs_in_one_process_are_the_same_run(folder: Path, tmp_path: Path) -> None:
    recipes = [runs.resolved(folder, output_dir=str(tmp_path / name)) for name in ("one", "two")]
    assert ranks.on_ranks(1, twice, *recipes) == [None]
    one, two = (tmp_path / name / "final" / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_bf16_distillation_brings_the_student_closer(folder: Path, tmp_path: Path) -> None:
    metrics = train(folder, tmp_path / "run", train__dtype="bf16", train__steps=6, objective__sft=0.0)
    assert metrics[-1]["kl"] < 0.8 * metrics[0]["kl"]


def test_frozen_parts_stay_and_sft_needs_no_teacher(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"objective__freeze_embeddings": True, "objective__freeze_lm_head": True, "objective__kl": 0.0}
    metrics = train(folder, run, teacher="missing-teacher", **changes)
    assert "kl" not in metrics[0] and metrics[0]["sft"] > 0
    before, after = (load_file(d / "model.safetensors") for d in (folder / "student", run / "final"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= same
    assert "model.layers.0.self_attn.kv_b_proj.weight" not in same


def poisoned(recipe: Any) -> None:
    """A run whose teacher gives NaN from step 3 on, on rank 1 only."""
    import os

    calls = 0
    real = targets.final_hidden

    def final_hidden(model: Any, data: Any) -> torch.Tensor:
        nonlocal calls
        calls += not model.training
        hidden = real(model, data)
        return hidden * torch.nan if not model.training and calls > 4 and os.environ["RANK"] == "1" else hidden

    targets.final_hidden = final_hidden
    loop.distill_model(recipe)


def test_a_loss_that_is_not_finite_stops_every_rank(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"))
    results = ranks.on_ranks(2, poisoned, recipe)
    assert all(isinstance(error, NonFiniteError) for error in results)
    assert all("step 3" in str(error) and "step-2" in error.hint for error in results)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_bad_input_writes_nothing(folder: Path, tmp_path: Path) -> None:
    for error, changes in [
        (BadInputError, {"data__sources": [{"path": "missing.jsonl"}]}),
        (BadInputError, {"model": str(tmp_path / "missing")}),
        (BadInputError, {"teacher": str(tmp_path / "missing")}),
    ]:
        with pytest.raises(error):
            train(folder, tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="is no multiple of"):
        train(folder, tmp_path / "run", 2, train__micro_batch_size=8)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_first_row_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    recipe = runs.resolved(folder, output_dir=str(tmp_path / "run"), train__steps=None, train__tokens=1024)
    text = preview(recipe.recipe)
    assert (
        "4 steps, 1,024 tokens, the 1,024 asked for, in whole steps" in text
        and "<eos>⟧|l⟦i⟧" in text
        and "30 of 32" in text
    )
    with pytest.raises(CheckpointError, match="there is no such checkpoint to resume from"):
        loop.distill_model(recipe, resume="autoo", dry_run=True)
    assert not (tmp_path / "run").exists()


def test_a_run_in_which_nothing_counts_is_refused(folder: Path, tmp_path: Path) -> None:
    chats = [texts.chat("q" * 300, "y")] * 4  # 2 of 307 tokens count; the first row of 32 has none of them
    source = {**chats_and_text(folder)[1], "overlong": "split"}
    texts.write_jsonl(folder / "chats.jsonl", chats, "chat")
    run = tmp_path / "run"
    with pytest.raises(BadInputError, match=r"chats\.jsonl: only 0\.65% of the tokens in its rows of 32 count"):
        train(folder, run, data__sources=[source])
    assert not run.exists()
    small = {"train__batch_tokens": 32, "train__micro_batch_size": 1}
    with pytest.raises(BadInputError, match="step 1, rows 0 to 0: no token counts in the loss"):
        train(folder, run, data__sources=[{**source, "min_counted": 0}], **small)


def test_a_resumed_run_must_have_the_same_data_rendered_the_same_way(folder: Path, tmp_path: Path) -> None:
    def identity(place: Path, template: str = "", line: str = "", **fields: Any) -> dict[str, object]:
        place.mkdir()
        source = {**chats_and_text(place)[1], **fields}
        for name, more in (("template.jinja", template), ("chats.jsonl", line)):
            (place / name).write_text(more + (place / name).read_text())
        recipe = runs.resolved(folder, data__sources=[source]).recipe
        corpus = load_corpus(recipe.data.sources[0], texts.tokenizer(), 256)
        return run_identity(recipe, [corpus], World(0, 1, torch.device("cpu")))

    first = identity(tmp_path / "first")
    for number, (changes, differing) in enumerate(
        [
            ({}, []),  # in another place
            ({"template": "~"}, ["data.sources.0: chat template", "data.sources.0: documents"]),
            ({"line": "{}\n"}, ["data.sources.0: chats.jsonl", "data.sources.0: documents"]),
            ({"train_on": "all"}, ["data.sources.0.train_on"]),
        ]
    ):
        other = identity(tmp_path / str(number), **changes)
        assert [line.partition(" was ")[0] for line in differences(first, other)] == differing


def test_fields_that_change_no_row_are_no_part_of_a_runs_identity(folder: Path) -> None:
    """So that runs resume which were started before these fields existed."""
    text, chats = chats_and_text(folder)

    def named(*sources: dict[str, Any]) -> set[str]:
        recipe = runs.resolved(folder, data__sources=list(sources)).recipe
        corpora = [load_corpus(source, texts.tokenizer(), 256) for source in recipe.data.sources]
        keys = {"data.weight_by", "data.sources.0.earlier_reasoning", "data.sources.0: documents"}
        return keys & run_identity(recipe, corpora, World(0, 1, torch.device("cpu"))).keys()

    assert named(text) == named(text, text) == set()
    assert named(chats) == {"data.sources.0.earlier_reasoning", "data.sources.0: documents"}
    assert named(text, chats) == {"data.weight_by"}


def test_variables_that_change_how_libraries_round_are_part_of_a_runs_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, world = runs.load_recipe("tiny").recipe, World(0, 1, torch.device("cpu"))
    before = run_identity(recipe, [], world)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert differences(before, run_identity(recipe, [], world)) == [
        "the variable NVIDIA_TF32_OVERRIDE was 'nothing' and is now '1'"
    ]


def test_learning_rate_rises_then_falls_to_the_minimum() -> None:
    settings = runs.load_recipe("tiny", ["train.steps=100", "optim.warmup_steps=10", "optim.min_lr=1e-5"]).recipe
    rates = [step.learning_rate(settings, n) for n in range(1, 101)]
    lr = settings.optim.lr
    assert rates[0] == lr / 10 and rates[9] == max(rates) == lr
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(1e-5)
    constant = settings.optim.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    settings = settings.model_copy(update={"optim": constant})
    assert {step.learning_rate(settings, n) for n in range(1, 101)} == {lr}


def test_wandb_works_offline(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", report__to="wandb", train__steps=2)
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (record,) = offline.glob("run-*.wandb")
    assert b"held_out_kl" in record.read_bytes()
