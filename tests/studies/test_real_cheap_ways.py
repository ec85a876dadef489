"""``studies.real.cheap_ways`` and its questions: every way is measured, and differs in what it says."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from studies.real import cheap_ways, questions
from studies.real.cheap_ways import LONG, SEQ, Study, arguments, table

from fcsd.bundled import located
from fcsd.eval.harness import evaluate_models
from fcsd.models.build import load_model

pytestmark = pytest.mark.lab


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run on a tiny model, whose long rows have 128 tokens and its short ones 32."""
    tiny.model("llama", initializer_range=0.1).save_pretrained(tmp_path / "model")
    for text, seed in (("own", 0), ("foreign", 1)):
        for part, rows in (("train", 8), ("held_out", 2)):
            (tmp_path / text / part).mkdir(parents=True)
            ids = tiny.tokens(rows, 128, seed=seed + rows).tolist()
            column = pa.array(ids, pa.list_(pa.int32()))
            pq.write_table(pa.table({"input_ids": column}), tmp_path / text / part / "part-00000.parquet")
    asked = [
        {"requests": [[[1, 5, n], [7, 9]], [[1, 5, n], [8]]], "lengths": [4, 2], "right": n % 2} for n in range(10, 18)
    ]
    monkeypatch.setattr(cheap_ways, "read", lambda file: {"A": asked, "B": asked[:4]})
    monkeypatch.setattr(cheap_ways, "SEQ", 32)
    monkeypatch.setattr(cheap_ways, "LONG", 128)
    costs = {"ladder": {"alone": [0.1, 0.2, 0.01, 0.04]}}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    texts = [f"--text={name}={tmp_path / name}" for name in ("own", "foreign")]
    shape = ["--tokens", "2048", "--batch", "4", "--held-out", "4", "--costs", str(tmp_path / "costs.json")]
    return [str(tmp_path / "model"), str(tmp_path / "out"), *texts, "--questions", "none", *shape]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["cheap_ways", *words])
    cheap_ways.main()
    return [json.loads(line) for line in (Path(words[1]) / "results.jsonl").read_text().splitlines()]


def test_every_way_is_measured_for_every_seed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(words, monkeypatch)
    found = {(line["form"], line["seed"]): line for line in lines if "form" in line}
    trained = [(way, seed) for way in ("base", "long", "rates", "task") for seed in (0, 1)] + [("twice", 0)]
    assert {*found} == {("original", None), ("untrained", None), ("mean of 2", None), *trained}
    kl = {key: line["kl"]["own"]["kl"] for key, line in found.items()}
    assert kl["original", None] == 0 and len({*kl.values()}) == len(kl)
    assert all(kl[key] < kl["untrained", None] for key in trained if key[0] != "task")
    (chosen,) = (line for line in lines if "chosen" in line)
    assert len(chosen["loss"]) == 4 and found["task", 0]["layers"] == chosen["chosen"]
    rows = table(lines).splitlines()
    assert len(rows) == 2 + 8 and rows[2].startswith("| original | 1 | 0.0000 |")


def test_what_is_known_of_a_row_gives_the_gradients_of_a_whole_pass(words: list[str]) -> None:
    study = Study(arguments().parse_args(words))
    known, _ = study.healed(study.layers, study.shuffled(0))
    study.layers, study.whole.inputs = (0,), None  # nothing is known of the first layers
    whole, _ = study.healed((2, 3), study.shuffled(0))
    for a, b in zip(known.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_long_rows_are_the_end_of_the_last_text_and_no_token_is_read_twice(words: list[str]) -> None:
    study = Study(arguments().parse_args(words))
    tail = study.tail.rows.flatten()
    assert torch.equal(tail, study.whole.rows.flatten()[-len(tail) :])
    read: list[torch.Tensor] = []
    study.heal = lambda form, seed, layers, batches: read.extend(text.rows[which] for text, which in batches)  # type: ignore[method-assign]
    study.long(0)
    assert [rows.shape[1] for rows in read[-2:]] == [cheap_ways.SEQ, cheap_ways.LONG] != [SEQ, LONG]
    everything = torch.cat([rows.flatten() for rows in read])
    assert torch.equal(everything.sort()[0], study.whole.rows.flatten().sort()[0])


def test_a_way_without_time_is_not_begun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run([*words, "--ways", "base", "--seconds", "-1"], monkeypatch)
    assert [line.get("form") for line in lines] == ["original", "untrained", None]
    assert "before base of seed 0" in lines[-1]["stopped"]


def test_recorded_questions_score_as_the_evaluation_does() -> None:
    teacher, mirror = Path(located("bundled:teacher")), Path(located("bundled:mirror"))
    asked = questions.record(teacher, mirror, ["piqa", "arc_easy", "openbookqa"], 12)
    found = questions.answers(load_model(teacher, dtype=torch.float32).eval(), asked)
    results = evaluate_models([teacher], tasks=["piqa", "arc_easy", "openbookqa"], data_mirror=mirror, limit=12)
    assert {name: task["right"] for name, task in found.items()} == {r["column"]: r["items"] for r in results}
