"""--layers auto: every layer is measured alone, and the few that cost half of the sum stay standard."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.cli.main import app
from fcsd.convert import convert_checkpoint
from fcsd.distill import layer_costs
from fcsd.distill.layer_costs import choose_by_cost
from fcsd.models.build import load_model
from fcsd.models.selection import cheapest, select_layers


@pytest.fixture(scope="module")
def model(repo: Path) -> Path:
    return repo / "assets" / "teacher"


def test_what_costs_most_stays_standard_and_costs_are_divergences(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Bread is made of flour, water and salt. It is baked in an oven. " * 4}) + "\n")
    done = choose_by_cost(str(model), "farskip", "auto", text)
    assert done.wiring.layers == cheapest(done.alone)
    standard = done.alone.keys() - done.wiring.layers
    told = done.to_text()
    assert 0 in standard and told.count("  stays standard\n") == len(standard) == 5
    assert f"{len(standard)} of 10 layers stay standard" in told
    alone = convert_checkpoint(model, tmp_path / "alone", layers="1", check=False)
    ids = load_tokenizer(model)(json.loads(text.read_text())["text"], return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        original, other = (
            load_model(path, dtype=torch.float32)(ids).logits.log_softmax(-1) for path in (model, alone.out)
        )
    expected = (original.exp() * (original - other)).sum(-1).mean()
    assert done.alone[1] == pytest.approx(float(expected), rel=0.05)  # an EOS stands at the end there


@pytest.mark.parametrize(
    ("costs", "standard"),
    [
        ([3.0, 2.0, 0.5, 0.7, 0.5, 0.9, 0.5, 0.5], {0, 1, 3, 5}),
        ([0.1, 0.1, 0.1, 0.2], {2, 3}),  # of equal ones the first
        ([2.0, 0.1, 0.2], {0}),  # half of three layers are two
        ([2.0], set()),
    ],
)
def test_the_half_that_costs_least_is_converted(costs: list[float], standard: set[int]) -> None:
    kept = cheapest(dict(enumerate(costs)))
    assert set(range(len(costs))) - set(kept) == standard and list(kept) == sorted(kept)
    assert len(kept) == len(select_layers("50%", len(costs))), "as many as where nothing was measured"
    assert cheapest(dict(enumerate(costs)), 2) == tuple(sorted(sorted(range(len(costs)), key=costs.__getitem__)[:2]))


def test_as_many_layers_as_asked_for_are_converted_on_text_of_the_model_itself(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_costs, "TOKENS", 32)  # to write 4 rows of 512 takes most of the time
    costs = str(tmp_path / "costs.json")
    given = ["convert", str(model), str(tmp_path / "out"), "--layers", "auto:2", "--costs", costs, "--json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.stderr
    layers = json.loads(done.stdout)["wiring"]["layers"]
    assert len(layers) == 2
    alone = json.loads(Path(costs).read_text())["farskip"]["alone"]
    assert len(alone) == 10 and sorted(alone)[:2] == sorted(alone[n] for n in layers)


def test_an_out_that_is_taken_is_refused_before_anything_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    monkeypatch.setattr(layer_costs, "choose_by_cost", lambda *_, **__: pytest.fail("was measured"))
    done = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out"), "--layers", "auto"])
    assert done.exit_code == 2 and "out" in done.stderr
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "auto", "--dry-run"], "reads the weights"),
        (["--layers", "auto:99"], ": 1 to "),
        (["--layers", "auto:x"], "is not understood"),
        (["--calibration", "text.jsonl"], "is not given"),
        (["--costs", "costs.json"], "is not given"),
        (["--layers", "auto", "--costs", "none/costs.json"], "has no directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], words: str, model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out"), *options])
    assert done.exit_code == 2 and words in done.stderr
    assert not (tmp_path / "out").exists()
