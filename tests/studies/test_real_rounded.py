"""The study of rounding rounds what it says, and asks and measures the rounded model."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from studies.real import rounded
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.models.rounded import to_int4


def test_forms_are_rounded_by_their_names_then_asked_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model("llama", initializer_range=0.2)
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(rounded, "load_tokenizer", lambda folder: None)
    (tmp_path / "text/held_out").mkdir(parents=True)
    ids = tiny.tokens(4, 32)
    pq.write_table(pa.table({"input_ids": ids.tolist()}), tmp_path / "text/held_out/a.parquet")
    asked = []
    monkeypatch.setattr(rounded, "evaluate_models", lambda forms, **how: asked.append((forms, how)))
    folder, out = tmp_path / "model", tmp_path / "out"
    words = ["rounded", folder, out, f"a={folder}", f"a+int4:g32={folder}", "--text", f"own={tmp_path / 'text'}"]
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--mirror", str(tmp_path), "--limit", "2"])
    rounded.main()
    ((forms, how),) = asked
    assert [form.name for form in forms] == ["a", "a+int4:g32"] and (how["limit"], how["out"]) == (2, out)
    as_is, low = (dict(form.model.named_parameters()) for form in forms)
    for name, weight in model.named_parameters():
        assert torch.equal(as_is[name], weight)
        linear = ".layers." in name and weight.ndim == 2
        assert torch.equal(low[name], to_int4(weight, 32) if linear else weight)
        assert torch.equal(low[name], weight) != linear, "embeddings, norms and head are not rounded, all else is"
    lines = [json.loads(line) for line in (out / "kl.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["a", "a+int4:g32"]
    theirs, own = (_logs(form.model, ids) for form in forms)
    expected = float((theirs.exp() * (theirs - own)).sum(-1).mean())
    assert [line["kl"]["own"]["kl"] for line in lines] == pytest.approx([0, expected], rel=1e-4, abs=1e-7)
    assert expected > 1e-3
    with pytest.raises(ConfigError, match="groups of 48 do not divide the 64 inputs of"):
        rounded.load("a+int4:g48", folder)


def test_what_the_page_says_of_healing_with_rounded_weights(repo: Path) -> None:
    text = " ".join((repo / "docs/REAL_MODELS.md").read_text().split())
    raw = json.loads((repo / "benchmarks/results/real_smollm2_int4_healing_cpu.json").read_text())
    original, healed, rounded_after, within = (one["kl"] for one in raw["forms"].values())
    told = f"{healed:.3f} nats on held-out foreign text, {rounded_after:.3f} after rounding to groups of 64, and"
    assert f"{told} {within:.3f} healed with such weights. The rounded original has {original:.3f}" in text
    assert f"leaves {100 * (within - healed) / (rounded_after - healed):.0f} % of what rounding costs" in text
    train = raw["recipe"]["train"]
    assert f"with {train['steps'] * train['batch_tokens']:,} tokens of foreign text" in text


def _logs(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.double()(ids.view(1, -1)).logits[0, :-1].log_softmax(-1)
