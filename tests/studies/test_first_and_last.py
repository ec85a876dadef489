"""Figure 3 on a tiny model: every point is the rewired model's own score, measured once, on one model."""

import json
import re
import sys
from pathlib import Path

import eval_data
import pytest
import tiny
import torch
from accelerate import dispatch_model
from studies.capability import first_and_last
from studies.capability.first_and_last import load_subject, measure

from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError
from fcsd.eval.statistics import paired_difference
from fcsd.models.build import unwired, wire
from fcsd.models.selection import layers_text, select_layers
from fcsd.models.wiring import Wiring

TEXTS = [" ".join(eval_data.WORDS[i:]) for i in range(5)]


@pytest.fixture(scope="module")
def mirror(tmp_path_factory) -> Path:
    return eval_data.write_mirror(tmp_path_factory.mktemp("mirror"), rows=3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "teacher"
    tiny.model("deepseek_v2", vocab_size=400, max_position_embeddings=1024).save_pretrained(path)
    eval_data.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return path


def held_out_loss(teacher: Path, layers: tuple[int, ...], name: str = "farskip") -> float:
    """Nats per token, from a model loaded and wired for this one measurement, by transformers' own loss."""
    subject = load_subject(str(teacher), "farskip", None, None)
    wire(subject.model, Wiring(name, layers))
    total = count = 0
    for words in TEXTS:
        ids = torch.tensor([[1, *subject.tokenizer(words)["input_ids"]]])
        total += subject.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def test_every_point_is_the_rewired_models_own_score(teacher, mirror, text, tmp_path):
    tasks = ["piqa", "lambada_openai"]
    sweep = measure(str(teacher), tmp_path, tasks=tasks, data_mirror=mirror, held_out=text)
    assert [(point["end"], point["n"]) for point in sweep["points"]] == [
        (e, n) for e in ("first", "last") for n in range(5)
    ]
    for point in sweep["points"]:
        loss = point["scores"]["Held-out loss"]["value"]
        assert loss == pytest.approx(held_out_loss(teacher, select_layers(point["layers"], 4)), rel=1e-5)
        assert 0 <= point["scores"]["PIQA"]["value"] <= 1
    losses = {(point["end"], point["n"]): point["scores"]["Held-out loss"] for point in sweep["points"]}
    assert losses["first", 0]["change"] == (0, 0)
    assert losses["first", 4] == losses["last", 4] and losses["first", 2] != losses["last", 2]
    rows = {tuple(layers): rows for layers, rows in _kept(tmp_path).items()}
    items = {layers: next(r for r in rows if r["task"] == "held_out")["items"] for layers, rows in rows.items()}
    assert losses["last", 2]["change"] == pytest.approx(paired_difference(items[2, 3], items[()]))
    assert json.loads((tmp_path / "sweep.json").read_text()) == json.loads(json.dumps(sweep))
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    change, error = losses["last", 2]["change"]
    assert len(lines) == 2 + 10 and f"{losses['last', 2]['value']:.3f} ({change:+.3f} ± {error:.3f})" in lines[2 + 7]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def _kept(out: Path) -> dict[tuple[int, ...], list[dict]]:
    """The points on disk in the order they were measured: none, 1 first, 1 last, ..."""
    order = [(), (0,), (3,), (0, 1), (2, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)]
    lines = [json.loads(line)[1] for line in (out / "points.jsonl").read_text().splitlines() if line]
    return dict(zip(order, lines, strict=True))


def test_a_killed_sweep_repeats_no_finished_point(teacher, text, tmp_path, monkeypatch):
    measured = []
    real = first_and_last.held_out_result

    def counted(*args):
        if len(measured) == 3:
            measured.append("killed")
            raise KeyboardInterrupt
        measured.append("point")
        return real(*args)

    monkeypatch.setattr(first_and_last, "held_out_result", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(str(teacher), tmp_path, held_out=text)
    sweep = measure(str(teacher), tmp_path, held_out=text)
    assert measured.count("point") == 8, "0 and 4 are shared by both curves"
    assert measure(str(teacher), tmp_path, held_out=text) == sweep
    assert measured.count("point") == 8
    measure(str(teacher), tmp_path, held_out=text, points=[4], limit=2)
    assert measured.count("point") == 10, "less text is another measurement"
    measure(str(teacher), tmp_path, held_out=text, points=[4], wiring="ladder")
    assert measured.count("point") == 12


def test_refusals(teacher, text, tmp_path):
    for options in ({}, {"held_out": text, "points": [5]}, {"held_out": text, "points": [-1]}):
        with pytest.raises(ConfigError):
            measure(str(teacher), tmp_path / "out", **options)
    convert_checkpoint(str(teacher), tmp_path / "converted", check=False)
    with pytest.raises(BadInputError, match="converted already"):
        measure(str(tmp_path / "converted"), tmp_path / "out", held_out=text)
    assert not (tmp_path / "out").exists()


def test_rewiring_a_model_that_accelerate_has_dispatched():
    plain = tiny.model("deepseek_v2")
    ids = tiny.tokens()
    with torch.no_grad():
        unchanged = plain(input_ids=ids).logits
        wire(plain, Wiring("ladder", (1, 2)))
        expected = plain(input_ids=ids).logits
        hooked = dispatch_model(tiny.model("deepseek_v2"), {"": "cpu"}, force_hooks=True)
        assert torch.equal(wire(hooked, Wiring("ladder", (1, 2)))(input_ids=ids).logits, expected)
        assert torch.equal(wire(hooked, unwired())(input_ids=ids).logits, unchanged)
    assert not torch.equal(expected, unchanged)


@pytest.mark.parametrize("layers", [(), (0,), (0, 1), (0, 2, 5, 6, 7), (3, 9), tuple(range(10))])
def test_layers_text_is_what_convert_takes(layers):
    assert select_layers(layers_text(layers), 10) == layers


def test_command_line(teacher, text, tmp_path, monkeypatch, capsys):
    arguments = [str(teacher), "--out", str(tmp_path), "--held-out", str(text), "--points", "2"]
    monkeypatch.setattr(sys, "argv", ["first_and_last", *arguments])
    first_and_last.main()
    assert re.search(r"\| last +\| 2 +\|", capsys.readouterr().out)
