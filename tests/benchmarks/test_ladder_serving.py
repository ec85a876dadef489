"""``benchmarks/infer/ladder_serving.py``: its measurements, and the tables of whole models that follow from them."""

import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks.infer import ladder_serving as ladder

pytestmark = pytest.mark.lab

GIB = 1 << 30
FASTER = {"standard": 1.0, "ladder": 1.25, "parallel": 1.2, "desync-2x": 1.1, "desync-4x": 1.3}


def measured(piece) -> list[dict]:
    """Rows as ``benchmarks.infer`` writes them: 10 ms + 2 ms per layer for a prefill, a tenth of that for a token."""
    rows = []
    for batch in piece.batches:
        for wiring, kind in [*((name, "nccl") for name in FASTER), ("standard", "none")]:
            factor = FASTER[wiring] * (1.5 if kind == "none" else 1.0)
            lost = wiring == "parallel" and batch == 64
            prefill = (10 + 2 * piece.layers) / factor
            row = dict(tp=piece.degree, batch=batch, wiring=wiring, reduce=kind, exact=kind == "nccl")
            times = (
                dict.fromkeys(("prefill_ms", "decode_ms")) if lost else dict(prefill_ms=prefill, decode_ms=prefill / 10)
            )
            rows.append(row | times | dict(out_of_memory=lost))
    return rows


def test_the_environment_adds_options_to_every_call(monkeypatch):
    piece = next(ladder.pieces(4, ["70B"]))
    plain = ladder.command(piece, Path("out"), "nccl")
    monkeypatch.setenv("OPTIONS", "--no-graphs")
    assert ladder.command(piece, Path("out"), "nccl") == [*plain, "--no-graphs"]


def test_every_table_has_its_measurements():
    pieces = list(ladder.pieces(4, list(ladder.SIZES)))
    assert {piece.size for piece in pieces if 4 in piece.batches and piece.degree == 4} == set(ladder.SIZES)
    assert {piece.degree for piece in pieces if piece.size == "70B"} == {1, 2, 4}
    assert {piece.batches for piece in pieces if piece.size == "70B"} == {(1, 4, 16, 64)}
    for link in ladder.LINKS:
        depths = [p.layers for p in pieces if (p.size, p.link, p.degree) == ("8B", link, 4)]
        assert depths == list(ladder.DEPTHS)


def test_times_of_whole_models_lie_on_the_line_through_two_depths(tmp_path, capsys):
    for piece in ladder.pieces(4, ["8B", "70B"]):
        (tmp_path / piece.folder).mkdir()
        (tmp_path / piece.folder / "infer.json").write_text(json.dumps({"rows": measured(piece)}))
    ladder.tables(tmp_path, 139 * GIB)

    rows = json.loads((tmp_path / "tables.json").read_text())
    one = next(r for r in rows if (r["size"], r["link"], r["tp"], r["name"]) == ("8B", "nvlink", 4, "ladder"))
    assert one["prefill_ms"] == pytest.approx((10 + 2 * 32) / 1.25)
    assert one["total_ms"] == pytest.approx((74 + 511 * 7.4) / 1.25)
    assert one["tokens_per_s"] == pytest.approx(4 * 512 / one["total_ms"] * 1e3)
    assert one["times_standard"] == pytest.approx(1.25)
    bound = next(r for r in rows if (r["size"], r["tp"], r["name"], r["link"]) == ("70B", 4, "bound", "no-nvlink"))
    assert bound["times_standard"] == pytest.approx(1.5)
    single = {(r["batch"], r["out_of_memory"]) for r in rows if (r["size"], r["tp"]) == ("70B", 1)}
    assert single == {(1, False), (4, True), (16, True), (64, True)}  # 141 GB of weights
    assert {r["wiring"] for r in rows if r["out_of_memory"] and r["tp"] == 4} == {"parallel"}

    written = (tmp_path / "tables.md").read_text()
    text = re.sub(" +", " ", written)
    assert "| 8B | 531.2 | 1.25 | 1.2 | 1.1 | 1.3 | 1.5 |" in text
    assert "| TP 1, batch 64 | OOM | OOM | OOM | OOM | OOM | OOM |" in text
    assert "## Table 6: 70B, batch 64, TP 4" in text and "| nvlink | parallel | OOM | OOM | OOM |" in text
    assert (tmp_path / "figure_4.png").stat().st_size > 1000
    assert written.strip() in capsys.readouterr().out


def test_what_does_not_fit_is_known_from_the_sizes():
    assert ladder.fits("70B", 4, 64, 139 * GIB)
    assert ladder.fits("70B", 1, 1, 139 * GIB) and not ladder.fits("70B", 1, 4, 139 * GIB)
    assert ladder.fits("176B", 4, 4, 139 * GIB) and not ladder.fits("176B", 2, 4, 139 * GIB)


def test_a_measurement_without_end_is_told_to_end(tmp_path):
    told, ready = tmp_path / "told", tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(told)!r}).touch(), sys.exit(0)))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(600)"
    )
    assert not ladder.ends_well([sys.executable, "-c", code], 5)
    assert ready.exists() and told.exists()
    assert ladder.ends_well([sys.executable, "-c", ""], 60)
    assert not ladder.ends_well([sys.executable, "-c", "raise SystemExit(1)"], 60)
