"""``studies.real.quantised``: every form is measured once for each seed, and forms are what they say."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from studies.real import quantised
from studies.real.quantised import Study, parameters_of, table, weights_of
from studies.real.rounded import to_int4
from torch import nn

pytestmark = pytest.mark.lab
WAYS = ("layers", "adapters", "int4", "int4-bf16-teacher")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run on a tiny model, whose GPTQ rounds to nearest: llm-compressor is not installed here."""
    tiny.model("llama", initializer_range=0.1).save_pretrained(tmp_path / "model")
    for part, rows in (("train", 8), ("held_out", 1)):
        (tmp_path / "text" / part).mkdir(parents=True)
        ids = tiny.tokens(rows, quantised.SEQ, seed=rows).tolist()
        column = pa.array(ids, pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": column}), tmp_path / "text" / part / "part-00000.parquet")
    monkeypatch.setattr(Study, "gptq", lambda self, model: self.rtn(weights_of(model)))
    shape = ["--tokens", "8192", "--batch", "2", "--held-out", "1", "--rank", "4", "--seeds", "2"]
    return [str(tmp_path / "model"), str(tmp_path / "out"), "--text", f"own={tmp_path / 'text'}", *shape]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["quantised", *words])
    quantised.main()
    return [json.loads(line) for line in (Path(words[1]) / "results.jsonl").read_text().splitlines()]


def test_every_form_is_measured_for_every_seed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(words, monkeypatch)
    healed = [f"{way}{how}" for way in WAYS[:2] for how in ("", "+rtn", "+gptq")]
    healed += [f"{way}{how}" for way in WAYS[2:] for how in ("+beside", "+rerounded")]
    alone = ["original", "int4 alone: rtn", "int4 alone: gptq", "untrained", "untrained, int4"]
    assert [line["form"] for line in lines] == alone + healed * 2
    found = {(line["form"], line["seed"]): line for line in lines}
    kl = {key: line["kl"]["own"]["kl"] for key, line in found.items()}
    assert kl["original", None] == 0 and all(value > 1e-6 for key, value in kl.items() if key[0] != "original")
    assert kl["layers", 0] < kl["untrained", None] and kl["layers", 0] != kl["layers", 1]
    size = {form: line["bytes"] for (form, _), line in found.items()}
    assert size["int4+rerounded"] == size["layers+gptq"] < size["int4+beside"] < size["layers"] == size["original"]
    assert len(table(lines).splitlines()) == 2 + len(alone) + len(healed)
    assert "| layers | 2 |" in table(lines)


def test_a_training_without_time_is_not_begun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run([*words, "--seconds", "0"], monkeypatch)
    assert [line["form"] for line in lines[:-1]] == [
        "original",
        "int4 alone: rtn",
        "int4 alone: gptq",
        "untrained",
        "untrained, int4",
    ]
    assert lines[-1]["stopped"].endswith("seconds were left before seed 0")


def test_weights_and_adapters_are_found_by_the_paths_of_the_original(words: list[str]) -> None:
    given = quantised.arguments().parse_args(words)
    study = Study(given)
    student = study.model(study.rtn(weights_of(study.original)))
    before = {path: weight.clone() for path, weight in weights_of(student).items()}
    for path, weight in weights_of(study.original).items():
        assert torch.equal(before[path], to_int4(weight, 64)) and not torch.equal(before[path], weight)
    adapters = study.add(student, 0)
    layers = {path.split(".")[2] for path in adapters}
    assert layers == {"2", "3"} and len(adapters) == 14 and len(parameters_of(adapters)) == 28
    assert {path: weight.shape for path, weight in weights_of(student).items()} == {
        path: weight.shape for path, weight in before.items()
    }
    assert all(isinstance(study.original.get_submodule(path), nn.Linear) for path in before)
