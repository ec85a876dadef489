"""--layers auto: every layer is measured alone, and those that stand out stay standard."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.cli.main import app
from fcsd.convert import convert_checkpoint
from fcsd.distill import layer_costs
from fcsd.distill.layer_costs import choose_by_cost
from fcsd.models.build import load_model


@pytest.fixture(scope="module")
def model(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled teacher, whose second layer's attention is ten times as large."""
    folder, teacher = tmp_path_factory.mktemp("models") / "original", repo / "assets" / "teacher"
    folder.mkdir()
    for file in teacher.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("layers.1.self_attn.o_proj.weight"):
                tensors[name] = tensors[name] * 10
        save_file(tensors, folder / file.name, {"format": "pt"})
    return folder


def test_what_stands_out_stays_standard_and_costs_are_divergences(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Bread is made of flour, water and salt. It is baked in an oven. " * 4}) + "\n")
    done = choose_by_cost(str(model), "farskip", "auto", text)
    # The teacher's first layer stands out by itself.
    assert done.wiring.layers == tuple(done.alone)[2:]
    assert "  1 " in done.to_text() and done.to_text().count("stays standard") == 2
    alone = convert_checkpoint(model, tmp_path / "alone", layers="1", check=False)
    ids = load_tokenizer(model)(json.loads(text.read_text())["text"], return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        original, other = (
            load_model(path, dtype=torch.float32)(ids).logits.log_softmax(-1) for path in (model, alone.out)
        )
    expected = (original.exp() * (original - other)).sum(-1).mean()
    assert done.alone[1] == pytest.approx(float(expected), rel=0.05)  # an EOS stands at the end there


def test_as_many_layers_as_asked_for_are_converted_on_text_of_the_model_itself(model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out"), "--layers", "auto:2", "--json"])
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["wiring"]["layers"]) == 2


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
        (["--layers", "auto:99"], "layers can be converted"),
        (["--layers", "auto:x"], "is not understood"),
        (["--calibration", "text.jsonl"], "is not given"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], words: str, model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out"), *options])
    assert done.exit_code == 2 and words in done.stderr
    assert not (tmp_path / "out").exists()
