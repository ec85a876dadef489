"""``quantised``: every form is measured once for each seed, and forms are what they say."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from benchmarks.programs import parser_of, start
from studies.real import quantised, questions
from studies.real.quantised import WAYS, Study, parameters_of, table, weights_of
from studies.real.rounded import to_int4
from studies.real.runner import SEQ
from torch import nn

from fcsd.checkpoint.location import located
from fcsd.eval.harness import evaluate_models
from fcsd.models.build import load_model

pytestmark = pytest.mark.lab


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run on a tiny model, whose GPTQ rounds to nearest: llm-compressor is not installed here."""
    tiny.model("llama", initializer_range=0.1).save_pretrained(tmp_path / "model")
    for part, rows in (("train", 8), ("held_out", 1)):
        (tmp_path / "text" / part).mkdir(parents=True)
        ids = tiny.tokens(rows, SEQ, seed=rows).tolist()
        column = pa.array(ids, pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": column}), tmp_path / "text" / part / "part-00000.parquet")
    monkeypatch.setattr(Study, "gptq", lambda self, model: self.rtn(weights_of(model)))
    shape = ["--tokens", "8192", "--batch", "2", "--held-out", "1", "--rank", "4", "--seeds", "2"]
    return [str(tmp_path / "model"), str(tmp_path / "out"), "--text", f"own={tmp_path / 'text'}", *shape]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    start("studies.real", "quantised", *words)
    return [json.loads(line) for line in (Path(words[1]) / "results.jsonl").read_text().splitlines()]


def test_every_form_is_measured_for_every_seed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(words, monkeypatch)
    healed = [f"{way}{how}" for way in WAYS[:2] for how in ("", "+rtn", "+gptq")]
    healed += [f"{way}+beside" for way in WAYS[2:]]
    alone = ["original", "int4 alone: rtn", "int4 alone: gptq", "untrained", "untrained, int4"]
    assert [line["form"] for line in lines] == alone + healed * 2
    found = {(line["form"], line["seed"]): line for line in lines}
    kl = {key: line["kl"]["own"]["kl"] for key, line in found.items()}
    assert kl["original", None] == 0 and all(value > 1e-6 for key, value in kl.items() if key[0] != "original")
    assert kl["layers", 0] < kl["untrained", None] and kl["layers", 0] != kl["layers", 1]
    size = {form: line["bytes"] for (form, _), line in found.items()}
    assert size["int4 alone: gptq"] == size["layers+gptq"] < size["int4+beside"] < size["layers"] == size["original"]
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
    assert lines[-1]["stopped"].endswith("seconds were left before layers of seed 0")


def test_one_seed_of_some_ways_by_two_choices_of_layers_is_asked_questions(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"requests": [[[1, 2], [3]], [[1, 2], [4, 5]]], "lengths": [3, 4], "right": 1}
    with gzip.open(tmp_path / "questions.json.gz", "wt") as file:
        json.dump({"PIQA": [row, {**row, "right": 0}]}, file)
    chosen = ["--ways", "layers", "--seeds", "1", "--first-seed", "2", "--layers", "50%", "last:3"]
    lines = run([*words, *chosen, "--questions", str(tmp_path / "questions.json.gz")], monkeypatch)
    trained = ["untrained", "untrained, int4", "layers", "layers+rtn", "layers+gptq"]
    assert [line["form"] for line in lines] == ["original", "int4 alone: rtn", "int4 alone: gptq", *trained * 2]
    assert [line["layers"] for line in lines[3:]] == ["50%"] * 5 + ["last:3"] * 5
    assert [line["seed"] for line in lines[5:8]] == [2] * 3
    # One of both questions is right, whichever ending a model prefers.
    answered = {line["form"]: sum(line["answers"]["PIQA"]["right"]) for line in lines if "answers" in line}
    assert answered == dict.fromkeys(["original", "int4 alone: gptq", *trained[:3], "layers+gptq"], 1)
    rows = [[cell.strip() for cell in row.split("|")] for row in table(lines).splitlines()]
    shown = {row[1]: row for row in rows}
    assert shown["layers, 50%"][5] == "50.00" and shown["layers, 50%"][6].startswith("+0.00 ± ")
    assert shown["original"][5:7] == ["50.00", ""] and shown["layers+rtn, last:3"][5:7] == ["", ""]
    assert shown["layers, 50%"][3] != shown["layers, last:3"][3]


def test_weights_and_adapters_are_found_by_the_paths_of_the_original(words: list[str]) -> None:
    given = parser_of(quantised, "quantised").parse_args(words)
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


def test_recorded_questions_score_as_the_evaluation_does() -> None:
    teacher, mirror = Path(located("bundled:teacher")), Path(located("bundled:mirror"))
    asked = questions.record(teacher, mirror, ["piqa", "arc_easy", "openbookqa"], 12)
    found = questions.answers(load_model(teacher, dtype=torch.float32).eval(), asked)
    results = evaluate_models([teacher], tasks=["piqa", "arc_easy", "openbookqa"], data_mirror=mirror, limit=12)
    assert {name: task["right"] for name, task in found.items()} == {r["column"]: r["items"] for r in results}
