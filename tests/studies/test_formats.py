"""The study of quantised wires resumes, and studies/formats/FORMATS_QUALITY.md says what the stored study found."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import eval_data
import pytest
import tiny
from studies.formats import bandwidths, study, tables
from studies.formats import page as wires_page
from studies.formats.formats import studied
from studies.formats.plan import TABLE_7, TABLES, pieces

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def stored(repo: Path) -> dict[str, Any]:
    return json.loads((repo / "benchmarks/results/wires_quality.json").read_text())


def nats(stored: dict[str, Any], direction: str, format: str) -> float:
    (found,) = [p["nats"] for p in stored["losses"] if (p["direction"], p["format"]) == (direction, format)]
    return found


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    page = (repo / wires_page.PAGE).read_text()
    assert wires_page.filled(page, wires_page.sections(repo)) == page, "run python studies/formats/page.py"


def test_the_stored_study_is_whole(stored: dict[str, Any]) -> None:
    assert [(piece["direction"], piece["format"]) for piece in stored["losses"]] == pieces()
    assert all(piece["bits_on_the_wire"] == studied(piece["format"]).bits for piece in stored["losses"])
    assert [row["format"] for row in stored["scores"]] == [None, *(row.format for row in TABLE_7)]


def test_what_the_page_says_of_the_orders(stored: dict[str, Any]) -> None:
    """The all-reduce costs more than dispatch, and spike reserving less than rounding, and that less than LogFMT."""
    for format in ("int5", "int4:g128", "int3:g128", "int2:g128", "int4:g32", "int3:g32", "int2:g32"):
        assert nats(stored, "all-reduce", format) > nats(stored, "dispatch", format)
    for bits in (3, 2):
        formats = [f"int{bits}:g32:sr", f"int{bits}:g32", f"logfmt{bits}:g32"]
        losses = [nats(stored, "all-reduce", format) for format in formats]
        assert losses == sorted(losses)


def test_a_format_is_best_if_none_of_its_size_or_less_loses_less() -> None:
    points = [(4.0, 0.5), (2.5, 0.7), (4.5, 0.6), (8.25, 0.1), (4.0, 0.4), (6.0, 0.4)]
    found = tables.pareto([{"bits_on_the_wire": bits, "nats": nats} for bits, nats in points])
    assert [(piece["bits_on_the_wire"], piece["nats"]) for piece in found] == [(8.25, 0.1), (4.0, 0.4), (2.5, 0.7)]


def test_speeds_of_stored_collectives_stand_beside_those_of_the_paper() -> None:
    about = {"environment": {"gpus": [{"name": "NVIDIA H200"}]}, "world": 2}
    timed = {
        "nccl": [1.0, 0.9, 1.1],
        "symmetric": [0.7, 0.6, 0.8],
        "quantised:int8": [2.0, 1.9, 2.1],
        "quantised:int2:sr": [4.0, 3.9, 4.1],
        "quantised:int4": None,  # its result was wrong
        "quantised:int8, one shot, 32 blocks": [0.1, 0.1, 0.1],
        "quantised:int8 in steps": [5.0, 4.9, 5.1],
    }
    speeds = bandwidths.of_all_reduce({**about, "ms": {"64 MiB": timed, "0.25 MiB": {"nccl": [1.0]}}})
    assert speeds == {
        "2 H200, in one kernel, 64 MiB": {"int8": 0.5, "int2:g32:sr": 0.25},
        "2 H200, in two steps, 64 MiB": {"int8": 0.2},
    }
    text = bandwidths.to_text(bandwidths.TABLE_9, speeds)
    assert re.search(r"\| fcsd: 2 H200, in one kernel, 64 MiB +\| 0.50 +\| - .*\| 0.25 +\|\n", text)
    (small,) = bandwidths.of_all_reduce({**about, "ms": {"0.25 MiB": timed}}).keys() & {
        "2 H200, in one kernel, 256 KiB"
    }
    assert small
    sent = {"bf16": [3.0], "bf16, wire": [2.0], "int4:g32, fused": [1.5], "int4:g32, wire": [0.5], "int8, steps": [9.0]}
    assert bandwidths.of_exchange({**about, "ms": {"any expert": {"NCCL": sent}}}) == {
        "2 H200, any expert, NCCL": {"int4:g32": 2.0},
        "2 H200, any expert, NCCL, the exchange alone": {"int4:g32": 4.0},
    }


def test_formats_of_the_study() -> None:
    assert studied("int4:g32").bits == studied("hadamard4:g32").bits == studied("logfmt4:g32").bits == 5.0
    assert all(Format.parse(row.format) for table in TABLES for row in table.rows if row.format.startswith("int"))
    for name in ("hadamard4", "logfmt9:g32", "int4:g33"):
        with pytest.raises(ConfigError):
            studied(name)


def test_a_killed_study_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any]) -> None:
    model = tiny.model("deepseek_v2", hidden_size=128, vocab_size=400, num_hidden_layers=2)
    model.save_pretrained(tmp_path / "model")
    eval_data.tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(eval_data.WORDS[i:])}) + "\n" for i in range(4)))
    mirror = eval_data.write_mirror(tmp_path / "mirror")
    tasks: dict[str, Any] = {"tasks": ("piqa",), "limit": 2, "data_mirror": mirror}
    what = study.Study(str(tmp_path / "model"), text, every=2, max_length=32, tp_degree=2, **tasks)
    few = pieces()[::8]  # some of every direction
    monkeypatch.setattr(study, "pieces", lambda: few)
    for module in (study, tables):
        monkeypatch.setattr(module, "TABLE_7", TABLE_7[-1:])
    real, count = study._measure, 0

    def killed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 6:  # a piece under a format calls the function twice
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(study, "_measure", killed)
    with pytest.raises(KeyboardInterrupt):
        study.run(what, tmp_path / "out")
    assert not (tmp_path / "out" / study.NAME).exists()
    count = -1000
    found = study.run(what, tmp_path / "out")
    # The two pieces of the tasks, the model without a format, and the first wire were known.
    assert count == -1000 + 2 * (len(few) - 1)
    monkeypatch.setattr(study, "_measure", None)
    again = study.run(what, tmp_path / "out")
    assert again["losses"] == found["losses"] and found["documents"] == 2
    assert json.loads((tmp_path / "out" / study.NAME).read_text())["losses"] == found["losses"]
    assert [row["format"] for row in found["scores"]] == [None, "int2:g32:sr"]
    monkeypatch.setattr(study, "_measure", real)
    beside = study.run(replace(what, processes=2, tasks=()), tmp_path / "beside")
    assert beside["losses"] == found["losses"]
    table = tables.to_text({**stored, "scores": found["scores"]}).split("### Table 7")[1].split("###")[0]
    assert "| SR INT2 | `int2:g32:sr` | 4 |" in re.sub(" +", " ", table) and "PIQA" in table
    tables.draw(found, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
