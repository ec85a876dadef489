"""export: the directory that is given to others, and the proof that it reloads without fcsd."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import quantised
import tiny
import torch
import yaml
from files import snapshot
from huggingface_hub import ModelCard
from reloads import fork_reloads
from safetensors.torch import load_file, save_file

from fcsd import parity
from fcsd.checkpoint import Layout, verify_tensors
from fcsd.config import Recipe
from fcsd.convert import convert_checkpoint
from fcsd.distill.run import manifest
from fcsd.errors import BadInputError, CheckpointError, ConfigError, DoesNotFitError, FcsdError
from fcsd.export import final as exporting
from fcsd.export import reload
from fcsd.export.card import SENTENCES, model_card
from fcsd.export.final import export_model
from fcsd.models import build
from fcsd.models.archs import ARCHS
from fcsd.models.wiring_block import NAMES, Wiring

README = "---\nlicense: apache-2.0\nlanguage: en\npipeline_tag: text-generation\ntags: [old]\n---\n# The base\n"


@pytest.fixture
def forked_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tests but those of the fresh process itself."""
    fork_reloads(monkeypatch)


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    tiny.model("deepseek_v2").save_pretrained(tmp_path / "base", max_shard_size="300KB")
    (tmp_path / "base" / "README.md").write_text(README)
    (tmp_path / "base" / "LICENSE").write_text("A licence.")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    convert_checkpoint(str(tmp_path / "base"), tmp_path / "converted", layers="1-3", check=False)
    return tmp_path / "converted"


def recipe_of(model: Path, output_dir: Path) -> str:
    """A run's recipe, in full, with paths of this machine and data sets of the hub."""
    sources = [{"path": "org/chats", "format": "hf", "messages": "m"}, {"path": f"{model.parent}/texts/a.parquet"}]
    values = {"name": "mine", "model": str(model), "output_dir": str(output_dir), "optim": {"lr": 1e-5}}
    recipe = Recipe.model_validate(values | {"data": {"sources": sources, "held_out": {"path": "held.jsonl"}}})
    return yaml.safe_dump(json.loads(recipe.model_dump_json()))


@pytest.fixture
def run(converted: Path, tmp_path: Path) -> Path:
    """A run directory as distill leaves it: two committed checkpoints, the first the better, and one that is not."""
    path = tmp_path / "run"
    (path / "eval").mkdir(parents=True)
    (path / "config.resolved.yaml").write_text(recipe_of(converted, path))
    model = build.load_model(converted)
    records = []
    for step, loss in ((10, 1.25), (20, 1.5), (30, 0.5)):
        model.lm_head.weight.data += 0.01
        folder = path / "checkpoints" / (f"step-{step}" if step < 30 else "step-30.tmp-0123abcd")
        model.save_pretrained(folder / "model")
        for file in converted.iterdir():
            if not (folder / "model" / file.name).exists() and "safetensors" not in file.name:
                (folder / "model" / file.name).write_bytes(file.read_bytes())
        files = manifest.described(folder, manifest.files(folder))
        content = {"step": step, "identity": {}, "files": files, "progress": {"step": step}}
        manifest.write_manifest(folder, content)
        records.append({"step": step, "kl": loss / 2, "held_out_sft": loss})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    row = {"task": "piqa_task", "column": "PIQA", "metric": "acc_norm", "stderr": 0.01, "n": 100, "items": [0.0] * 100}
    rows = [{**row, "model": "mine", "value": 0.625, "baseline": False}]
    rows += [{**row, "model": "base", "value": 0.75, "baseline": True}]
    (path / "eval" / "mine.json").write_text(json.dumps(rows))
    comparison = [{"model": "mine", "baseline": "base", "margin": 1.0, "tasks": [], "overall": None, "loss": None}]
    (path / "eval" / "comparison.json").write_text(json.dumps(comparison))  # by `fcsd eval --baseline`
    return path


def test_a_converted_model_is_exported_and_proven(converted: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    assert export_model(str(converted), tmp_path / "out") == tmp_path / "out"
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before
    assert list(tmp_path.glob(".*")) == []
    out = tmp_path / "out"
    assert set(snapshot(out)) == set(snapshot(converted)) - {".fcsd.json"} | {reload.RECORD}
    assert not any(str(tmp_path) in path.read_text() for path in out.iterdir() if path.suffix in (".json", ".md"))
    for shard in converted.glob("*.safetensors"):
        assert (out / shard.name).samefile(shard)
    assert (out / "LICENSE").read_text() == "A licence."

    record = json.loads((out / reload.RECORD).read_text())
    assert (record["layers"], record["of"]) == (4, 4)
    with torch.no_grad():
        model = build.load_model(out, experts_implementation="eager")
        logits = model(parity.token_ids(model), use_cache=False).logits
    assert record["logits_sha256"] == hashlib.sha256(logits.numpy().tobytes()).hexdigest()

    reload.check_record(out)
    (out / "README.md").write_text("people write cards")
    reload.check_record(out)
    code = (out / "wiring.py").read_text()
    (out / "wiring.py").write_text(code + "\n")
    with pytest.raises(BadInputError, match="its code changed"):
        reload.check_record(out)
    (out / "wiring.py").write_text(code)
    (out / "config.json").write_text((out / "config.json").read_text().replace("0.02", "0.03"))
    with pytest.raises(BadInputError, match="its fingerprint changed"):
        reload.check_record(out)
    for other, reason in ((converted, r"has no reload_proof\.json"), (out / "none", "no such directory")):
        with pytest.raises(BadInputError, match=reason):
            reload.check_record(other)


def card_of(converted: Path, run: Path | None = None, **block: str) -> ModelCard:
    raw = json.loads((converted / "config.json").read_text())
    raw["fcsd"] |= block
    return ModelCard(model_card(raw, ARCHS["deepseek_v2"], converted / "README.md", run, "org/mine"))


def test_the_card_says_what_it_is(converted: Path) -> None:
    card = card_of(converted, base_model="org/base", base_revision="0123abc")
    assert card.data.base_model == "org/base" and card.data.license == "apache-2.0"
    assert card.data.language == "en" and card.data.pipeline_tag == "text-generation"
    assert card.data.library_name == "transformers" and card.data.tags == ["farskip", "fcsd", "custom_code"]
    said = ("org/base (revision 0123abc)", "layers 1-3", "FarSkip-Collective", 'from_pretrained("org/mine"')
    assert all(text in card.text for text in (*said, "trust_remote_code=True", "fcsd_deepseek_v2"))
    assert "overlaps nothing" in card.text and "`fcsd serve`" in card.text
    assert "The base" not in card.text and "Training" not in card.text


def test_a_local_base_is_not_named_to_others(converted: Path, tmp_path: Path) -> None:
    card = card_of(converted)
    assert card.data.base_model is None
    assert str(tmp_path) not in str(card)


def test_a_base_card_that_cannot_be_read_is_no_obstacle(converted: Path) -> None:
    (converted / "README.md").write_text("---\nlicense: [unclosed\n---\n")
    assert card_of(converted).data.license is None


def test_the_licence_of_the_bundled_teacher_is_in_its_card(repo: Path) -> None:
    raw = json.loads((repo / "assets/teacher/config.json").read_text()) | {"model_type": "fcsd_deepseek_v2"}
    raw["fcsd"] = {"version": 1, **Wiring("farskip", (1,)).to_block(base_model="teacher", base_revision=None)}
    card = ModelCard(model_card(raw, ARCHS["deepseek_v2"], repo / "assets/teacher/README.md", None, "mine"))
    assert card.data.license == "apache-2.0"


def test_every_wiring_has_its_sentence() -> None:
    assert SENTENCES.keys() == set(NAMES)


@pytest.mark.usefixtures("forked_reloads")
def test_a_run_exports_its_latest_or_best_checkpoint(run: Path, tmp_path: Path, monkeypatch) -> None:
    before = snapshot(run)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "prove_reload", lambda *args: {"layers": 4, "of": 4})
        best = export_model(str(run), tmp_path / "best", checkpoint="best")
    latest = export_model(str(run), tmp_path / "latest", checkpoint="latest")
    assert exporting._choose(run, "step-10") == run / "checkpoints" / "step-10"
    assert snapshot(run) == before
    for out, step in ((latest, 20), (best, 10)):
        model = run / "checkpoints" / f"step-{step}" / "model"
        assert (out / "model.safetensors").samefile(model / "model.safetensors")
        assert json.loads((out / "config.json").read_text())["auto_map"]
        assert (out / "wiring.py").is_file() and (out / "chat_template.jinja").is_file()
    card = ModelCard.load(latest / "README.md")
    assert card.data.license == "apache-2.0"
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("PIQA", "acc_norm", 0.625)
    assert "| base | PIQA | acc_norm | 75.0 ± 1.0 | 100 |" in re.sub(" +", " ", card.text)
    assert "held_out_sft 0.5" in card.text
    assert str(tmp_path) not in card.content
    assert yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0]) == {
        "name": "mine",
        "model": "converted",
        "data": {
            "sources": [{"path": "org/chats", "format": "hf", "messages": "m"}, {"path": "a.parquet"}],
            "held_out": {"path": "held.jsonl"},
        },
        "optim": {"lr": 1e-5},
    }
    assert card.data.datasets == ["org/chats"]


def test_a_recipe_of_another_version_is_left_out_of_the_card(run: Path, converted: Path, caplog) -> None:
    (run / "config.resolved.yaml").write_text("name: mine\nunknown: 1\n")
    card = card_of(converted, run)
    assert "```yaml" not in card.text and "Last record" in card.text and card.data.datasets is None
    assert "the card leaves out the settings of the training" in caplog.text


def test_what_cannot_be_exported_is_refused(run: Path, converted: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match="is not converted by fcsd"):
        export_model(str(tmp_path / "base"), tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no checkpoint 'step-30'") as caught:
        export_model(str(run), tmp_path / "out", checkpoint="step-30")
    assert caught.value.hint == "Choose one of best, latest, step-20, step-10."
    with pytest.raises(ConfigError, match="is not empty"):
        export_model(str(converted), tmp_path / "base")
    with pytest.raises(ConfigError, match="overlaps"):
        export_model(str(converted), converted, force=True)
    for trained in ("checkpoints/step-10/model", "checkpoints", "final"):
        with pytest.raises(ConfigError, match="overlaps"):
            export_model(str(run), run / trained, checkpoint="step-20", force=True)
    assert snapshot(tmp_path) == before
    (run / "checkpoints" / "step-20" / "model" / "chat_template.jinja").write_text("{{ other }}")
    with pytest.raises(CheckpointError, match=r"model/chat_template\.jinja is damaged"):
        export_model(str(run), tmp_path / "out", checkpoint="latest")
    for committed in ("step-10", "step-20"):
        (run / "checkpoints" / committed).rename(run / committed)
    with pytest.raises(BadInputError, match="has no checkpoint yet"):
        export_model(str(run), tmp_path / "out")


def test_a_run_without_held_out_loss_has_no_best(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 20, "kl": 1.0}\n')
    with pytest.raises(ConfigError, match="was measured"):
        export_model(str(run), tmp_path / "out", checkpoint="best")
    assert exporting._choose(run, None).name == "step-20"
    (run / "metrics.jsonl").unlink()
    assert exporting._choose(run, None).name == "step-20"


def test_the_best_checkpoint_is_the_default_and_is_said(run: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """A run that was stopped early ends after its best checkpoint: the last one is not the one to give away."""
    monkeypatch.setattr(exporting, "prove_reload", lambda *args: {"layers": 4, "of": 4})
    caplog.set_level("INFO", "fcsd")
    out = export_model(str(run), tmp_path / "out")
    assert (out / "model.safetensors").samefile(run / "checkpoints" / "step-10" / "model" / "model.safetensors")
    assert any("is step-10 (the latest is step-20)" in message for message in caplog.messages)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "held_out_sft": 0.01}\n')
    assert exporting._choose(run, "best").name == "step-10"
    assert "step 5 had the lowest held-out loss; its checkpoint was not kept" in caplog.text


def test_a_checkpoint_that_training_deletes_is_chosen_again(run: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """Retention deletes the checkpoint while it is read; the next attempt takes the newest one then."""
    verify, committed = verify_tensors, run / "checkpoints"

    def delete_step_20(layout: Layout, *rest: Any) -> Any:
        if "step-20" in str(layout.path):
            (committed / "step-30.tmp-0123abcd").rename(committed / "step-30")
            shutil.rmtree(committed / "step-20")
        return verify(layout, *rest)

    monkeypatch.setattr("fcsd.checkpoint.checkpoint.verify_tensors", delete_step_20)
    monkeypatch.setattr(exporting, "prove_reload", lambda *args: {"layers": 4, "of": 4})
    out = export_model(str(run), tmp_path / "out", checkpoint="latest")
    assert (out / "model.safetensors").samefile(committed / "step-30" / "model" / "model.safetensors")
    assert any("step-20 was deleted by the running training" in message for message in caplog.messages)


def test_training_that_deletes_faster_than_export_reads_is_named(run: Path, tmp_path: Path, monkeypatch) -> None:
    steps = iter(range(21, 99))

    def delete(layout: Layout, *rest: Any) -> None:
        checkpoint, step = layout.path.parent, next(steps)
        newer, content = checkpoint.with_name(f"step-{step}"), manifest.read_manifest(checkpoint)
        shutil.copytree(checkpoint, newer)
        manifest.write_manifest(newer, content | {"step": step})
        shutil.rmtree(checkpoint)
        raise FileNotFoundError(layout.path)

    monkeypatch.setattr("fcsd.checkpoint.checkpoint.verify_tensors", delete)
    with pytest.raises(CheckpointError, match="training deleted the chosen checkpoint in each of 5 attempts"):
        export_model(str(run), tmp_path / "out", checkpoint="latest")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("forked_reloads")
def test_of_a_large_model_the_first_layers_are_reloaded(converted: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(parity, "free_memory", lambda: 1_500_000)
    out = export_model(str(converted), tmp_path / "out")
    record = json.loads((out / reload.RECORD).read_text())
    assert 0 < record["layers"] < record["of"] == 4
    monkeypatch.setattr(parity, "free_memory", lambda: 1000)
    with pytest.raises(DoesNotFitError):
        export_model(str(converted), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("forked_reloads")
def test_a_quantised_model_is_dequantised_for_its_proof(tmp_path: Path) -> None:
    base = quantised.write("deepseek_v3", tmp_path / "base")
    convert_checkpoint(str(base), tmp_path / "converted", check=False)
    out = export_model(str(tmp_path / "converted"), tmp_path / "out")
    assert (out / "model.safetensors").samefile(base / "model.safetensors")


def _broken_code(stage: Path) -> None:
    (stage / "wiring_block.py").write_text(
        (stage / "wiring_block.py").read_text().replace('"farskip": (1, 1)', '"farskip": (0, 1)')
    )


def _needs_fcsd(stage: Path) -> None:
    text = (stage / "modeling_fcsd.py").read_text()
    (stage / "modeling_fcsd.py").write_text("from fcsd.models.archs import ARCHS\n" + text)


def _broken_weight(stage: Path) -> None:
    shard = min(stage.glob("*.safetensors"))
    tensors = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.usefixtures("forked_reloads")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_broken_code, "its logits are not the model's"),
        (_broken_weight, "its logits are not the model's"),
        (_needs_fcsd, "does not load without fcsd"),
    ],
)
def test_without_proof_there_is_no_directory(converted: Path, tmp_path: Path, monkeypatch, spoil, message) -> None:
    prove = exporting.prove_reload

    def spoilt(source: Layout, stage: Path, *rest: Any) -> dict[str, Any]:
        spoil(stage)
        return prove(source, stage, *rest)

    monkeypatch.setattr(exporting, "prove_reload", spoilt)
    before = snapshot(converted)
    with pytest.raises(FcsdError, match=message):
        export_model(str(converted), tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".*")) == []
    assert snapshot(converted) == before
