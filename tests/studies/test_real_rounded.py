"""The study of rounding rounds what it says, and asks and measures the rounded model."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from benchmarks.programs import start
from studies.real import rounded
from torch import Tensor


def _nearest(row: list[float], group: int) -> list[float]:
    """Each value of a row as the nearest of the 16 multiples of its group's step; the slow way."""
    found = []
    for begin in range(0, len(row), group):
        step = max(map(abs, row[begin : begin + group])) / 7.5
        table = [code * step for code in range(-8, 8)]
        found += [min(table, key=lambda near: abs(near - value)) for value in row[begin : begin + group]]
    return found


@pytest.mark.parametrize("group", [32, 64])
def test_weights_become_the_nearest_of_sixteen_multiples_of_a_step(group: int) -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    weight[0, :64] = 0.0
    found = rounded.to_int4(weight, group)
    nearest = torch.tensor([_nearest(row, group) for row in weight.tolist()])
    assert torch.allclose((found - weight).abs(), (nearest - weight).abs(), atol=1e-6)  # two codes may be as near
    assert (found[0, :64] == 0).all() and (found - weight).abs().max() > 0.1
    assert rounded.to_int4(weight.bfloat16(), group).dtype == torch.bfloat16


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
    monkeypatch.setattr("fcsd.eval.harness.evaluate_models", lambda forms, **how: asked.append((forms, how)))
    folder, out = tmp_path / "model", tmp_path / "out"
    words = ["rounded", folder, out, f"a={folder}", f"a+int4:g32={folder}", "--text", f"own={tmp_path / 'text'}"]
    start("studies.real", *map(str, words), "--mirror", str(tmp_path), "--limit", "2")
    ((forms, how),) = asked
    assert [form.name for form in forms] == ["a", "a+int4:g32"] and (how["limit"], how["out"]) == (2, out)
    as_is, low = (dict(form.model.named_parameters()) for form in forms)
    for name, weight in model.named_parameters():
        assert torch.equal(as_is[name], weight)
        linear = ".layers." in name and weight.ndim == 2
        assert torch.equal(low[name], rounded.to_int4(weight, 32) if linear else weight)
        assert torch.equal(low[name], weight) != linear, "embeddings, norms and head are not rounded, all else is"
    lines = [json.loads(line) for line in (out / "kl.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["a", "a+int4:g32"]
    theirs, own = (_logs(form.model, ids) for form in forms)
    expected = float((theirs.exp() * (theirs - own)).sum(-1).mean())
    assert [line["kl"]["own"]["kl"] for line in lines] == pytest.approx([0, expected], rel=1e-4, abs=1e-7)
    assert expected > 1e-3
    with pytest.raises(ValueError, match="groups of 48 do not divide the 64 inputs of"):
        rounded.load("a+int4:g48", folder)


def _logs(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.double()(ids.view(1, -1)).logits[0, :-1].log_softmax(-1)
