"""Scores over a simulated quantised wire: what the option reads, what a result records, and who may use it."""

import json
import re
from pathlib import Path
from typing import Any

import eval_data
import pytest
import tiny

from fcsd.cli.main import app
from fcsd.errors import ConfigError
from fcsd.eval import tables
from fcsd.eval.compare import compare_models
from fcsd.eval.engines.engine import Engine
from fcsd.eval.engines.quantised import QuantisedCommunication
from fcsd.eval.harness import Loaded, evaluate_models, named_models
from fcsd.eval.results import ResultFile, read_results
from fcsd.export.card import _evaluation, model_card
from fcsd.models.archs import ARCHS


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(eval_data.WORDS[i:])}) + "\n" for i in range(5)))
    return path


@pytest.fixture(scope="module")
def rows(text: Path) -> list[dict[str, Any]]:
    """A model without a format, and over two wires."""
    model = Loaded("tiny", tiny.model("deepseek_v2", vocab_size=400), eval_data.tokenizer())
    mirror = eval_data.write_mirror(text.parent / "mirror")
    options: dict[str, Any] = {"tasks": ["PIQA"], "data_mirror": mirror, "limit": 4, "held_out": text}
    coarse = Engine(quantised=QuantisedCommunication.parse("dispatch=int2:g64,combine=int3:g32:sr"))
    reduced = Engine(quantised=QuantisedCommunication.parse("all-reduce=int2:g64", tp_degree=2))
    both = evaluate_models([model], baseline=model, engine=coarse, **options)
    return both + evaluate_models([model], engine=reduced, **options)


def test_a_model_over_a_wire_is_compared_with_itself(rows: list[dict[str, Any]]) -> None:
    assert [row["model"] for row in rows[1::2]] == [
        "tiny",
        "tiny+dispatch=int2-g64,combine=int3-sr",
        "tiny+all-reduce=int2-g64,tp=2",
    ]
    assert [row["baseline"] for row in rows] == [True, True, False, False, False, False]
    plain, wired, reduced = rows[1::2]
    assert len({plain["value"], wired["value"], reduced["value"]}) == 3  # the losses differ
    assert plain["settings_sha256"] == wired["settings_sha256"] and plain["engine"] == wired["engine"]
    (comparison,) = compare_models(rows[:4])
    assert comparison.model == wired["model"] and comparison.loss is not None
    assert comparison.loss.nats == pytest.approx(wired["value"] - plain["value"])


def test_a_result_records_its_wire(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert (rows[0]["wire"], rows[0]["wire_sha256"]) == (None, None)
    assert rows[2]["wire"] == {
        "dispatch": "int2:g64",
        "combine": "int3:sr",
        "tp_degree": 1,
        "bits_on_the_wire": {"dispatch": 2.5, "combine": 5.0},
    }
    assert len({row["wire_sha256"] for row in rows}) == 3
    lines = tables.plain_table(rows[:4]).splitlines()
    assert re.sub(" +", " ", lines[-1]) == "| Bits as sent | | | - | dispatch 2.5, combine 5 |"
    assert "Bits as sent" not in tables.plain_table(rows[:2])
    file, of_another_process = ResultFile(tmp_path / "one.json"), ResultFile(tmp_path / "one.json")
    for writer, row in ((file, rows[0]), (file, rows[2]), (of_another_process, rows[2])):
        writer.add(row)
    assert [row["wire"] for row in read_results(tmp_path / "one.json")] == [None, rows[2]["wire"]]


def test_a_card_does_not_show_scores_over_a_wire(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "config.resolved.yaml").write_text("name: mine\n")
    (tmp_path / "eval" / "a.json").write_text(json.dumps(rows[2:4]))
    block = {"wiring": "farskip", "variant": "full", "layers": [1], "border": "full", "tp_degree": 1, "distance": 1}
    raw = {"fcsd": {**block, "base_model": "a", "base_revision": None}, "model_type": "fcsd_deepseek_v2"}
    card = model_card(raw, ARCHS["deepseek_v2"], None, tmp_path, "mine")
    assert "Evaluation" not in card and "PIQA" not in card
    assert "PIQA" in _evaluation(rows[:2])


def test_the_option_is_read_and_shown() -> None:
    wire = QuantisedCommunication.parse("dispatch=int5, all-reduce=int4:g128", tp_degree=4)
    assert str(wire) == "dispatch=int5,all-reduce=int4-g128,tp=4" and wire.combine is None
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


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"device": "auto"}, "the whole model on one device"),
        ({"ep_size": 2}, "the whole model on one device"),
        ({"backend": "vllm"}, "the whole model on one device"),
        ({"generation": "graphs"}, "--quantised cannot generate in graphs"),
    ],
)
def test_engines_that_cannot_simulate_a_wire_are_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(quantised=QuantisedCommunication.parse("dispatch=int5"), **engine).check(2)


def test_names_of_models_over_a_wire() -> None:
    engine = Engine(quantised=QuantisedCommunication.parse("combine=int5"))
    named = named_models(["a/one", "two"], "a/one", engine)
    assert [(name, model, own.quantised is None) for name, model, own in named] == [
        ("one", "a/one", True),
        ("one+combine=int5", "a/one", False),
        ("two+combine=int5", "two", False),
    ]
    assert [name for name, *_ in named_models(["a/one", "two"], "a/one", Engine())] == ["one", "two"]
    with pytest.raises(ConfigError, match="named twice"):
        named_models(["two", "two"], None, engine)
    with pytest.raises(ConfigError, match="--baseline a/one: is the only MODEL"):
        named_models(["a/one"], "a/one", Engine())


def test_formats_that_do_not_divide_the_models_rows_are_refused(text: Path) -> None:
    model = Loaded("tiny", tiny.model("llama"), eval_data.tokenizer())
    wire = QuantisedCommunication.parse("all-reduce=int5", tp_degree=2)  # groups of 128, rows of 64
    with pytest.raises(ConfigError, match="do not divide rows of 64 values"):
        evaluate_models([model], tasks=["PIQA"], data_mirror=text.parent / "mirror", engine=Engine(quantised=wire))


def test_the_command_line_refuses_a_degree_without_a_wire(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(["eval", "nowhere", "--tp-degree", "2"])
    assert end.value.code == 2 and "--tp-degree belongs to --quantised all-reduce=FORMAT" in capsys.readouterr().err
