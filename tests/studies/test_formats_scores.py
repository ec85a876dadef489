"""Scores under simulated quantised communication: what the option reads, what a result records, who may use it."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import eval_data
import pytest
import tiny
from studies.formats import scores as program
from studies.formats.communication import QuantisedCommunication
from studies.formats.scores import bits_table, scores

from fcsd.errors import ConfigError
from fcsd.eval.compare import compare_models
from fcsd.eval.harness import Loaded
from fcsd.eval.results import read_results
from fcsd.export.card import _evaluation, model_card
from fcsd.models.archs import ARCHS

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(eval_data.WORDS[i:])}) + "\n" for i in range(5)))
    return path


@pytest.fixture(scope="module")
def rows(text: Path) -> list[dict[str, Any]]:
    """A model without formats, and under two kinds of them."""
    model = Loaded("tiny", tiny.model("deepseek_v2", vocab_size=400), eval_data.tokenizer())
    mirror = eval_data.write_mirror(text.parent / "mirror")
    coarse = QuantisedCommunication.parse("dispatch=int2:g64,combine=int3:g32:sr")
    reduced = QuantisedCommunication.parse("all-reduce=int2:g64", tp_degree=2)
    return scores(model, [coarse, reduced], tasks=["PIQA"], data_mirror=mirror, limit=4, held_out=text)


def test_a_model_under_formats_is_compared_with_itself(rows: list[dict[str, Any]]) -> None:
    assert [row["model"] for row in rows[1::2]] == [
        "tiny",
        "tiny+dispatch=int2-g64,combine=int3-sr",
        "tiny+all-reduce=int2-g64,tp=2",
    ]
    assert [row["baseline"] for row in rows] == [True, True, False, False, False, False]
    plain, coarse, reduced = rows[1::2]
    assert len({plain["value"], coarse["value"], reduced["value"]}) == 3  # the losses differ
    assert plain["settings_sha256"] == coarse["settings_sha256"] and plain["engine"] == coarse["engine"]
    comparison, _ = compare_models(rows)
    assert comparison.model == coarse["model"] and comparison.loss is not None
    assert comparison.loss.nats == pytest.approx(coarse["value"] - plain["value"])


def test_a_result_records_its_formats(rows: list[dict[str, Any]]) -> None:
    assert "wire" not in rows[0]
    assert rows[2]["wire"] == {
        "dispatch": "int2:g64",
        "combine": "int3:sr",
        "tp_degree": 1,
        "bits_on_the_wire": {"dispatch": 2.5, "combine": 5.0},
    }
    lines = [re.sub(" +", " ", line) for line in bits_table(rows).splitlines()]
    assert lines[2] == f"| {rows[2]['model']} | dispatch 2.5, combine 5 |" and len(lines) == 4


def test_a_card_does_not_show_scores_under_formats(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "config.resolved.yaml").write_text("name: mine\n")
    (tmp_path / "eval" / "a.json").write_text(json.dumps(rows[2:4]))
    block = {"wiring": "farskip", "variant": "full", "layers": [1], "border": "full", "tp_degree": 1, "distance": 1}
    raw = {"fcsd": {**block, "base_model": "a", "base_revision": None}, "model_type": "fcsd_deepseek_v2"}
    card = model_card(raw, ARCHS["deepseek_v2"], None, tmp_path, "mine")
    assert "Evaluation" not in card and "PIQA" not in card
    assert "PIQA" in _evaluation(rows[:2])


def test_formats_are_read_and_shown() -> None:
    found = QuantisedCommunication.parse("dispatch=int5, all-reduce=int4:g128", tp_degree=4)
    assert str(found) == "dispatch=int5,all-reduce=int4-g128,tp=4" and found.combine is None
    for text, degree, message in [
        ("int5", None, 'the direction "int5" is unknown or repeated'),
        ("dispatch=int5,dispatch=int4", None, 'the direction "dispatch" is unknown or repeated'),
        ("dispatch=int9", None, "2 to 8 bits"),
        ("dispatch=fp8", None, '"fp8" is not a format'),
        ("all-reduce=int5", None, "belong together"),
        ("dispatch=int5", 4, "belong together"),
        ("all-reduce=int5", 1, "reduces nothing"),
    ]:
        with pytest.raises(ConfigError, match=message):
            QuantisedCommunication.parse(text, degree)


def test_formats_that_do_not_divide_the_models_rows_are_refused(rows: Any, text: Path) -> None:
    model = Loaded("tiny", tiny.model("llama", vocab_size=400), eval_data.tokenizer())
    formats = [QuantisedCommunication.parse("all-reduce=int5", tp_degree=2)]  # groups of 128, rows of 64
    with pytest.raises(ConfigError, match="do not divide rows of 64 values"):
        scores(model, formats, tasks=["PIQA"], data_mirror=text.parent / "mirror", limit=1)


def test_the_program_writes_and_prints_both(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(repo / "assets/teacher"), str(tmp_path / "out.json"), "--quantised", "dispatch=int8"]
    words += ["--tasks", "piqa", "--limit", "2", "--data-mirror", str(repo / "assets/mirror")]
    monkeypatch.setattr(sys, "argv", ["scores", *words])
    program.main()
    plain, rounded = read_results(tmp_path / "out.json")
    assert rounded["model"] == "teacher+dispatch=int8" and plain["items"] and not rounded["baseline"]
    shown = capsys.readouterr().out
    assert "Bits as sent" in shown and "Minus teacher" in shown
