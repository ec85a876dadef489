"""Where a student starts: random weights from a config alone, in any wiring; or an original, rewired on the way in."""

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import texts
import tiny
import torch
from files import snapshot

from fcsd.checkpoint import read_config
from fcsd.config import load_recipe
from fcsd.convert import convert_checkpoint
from fcsd.distill import loop
from fcsd.distill.inputs import student_source, teacher_name
from fcsd.distill.preview import preview
from fcsd.distill.run.report import read_metrics
from fcsd.distill.student import chosen_parts, least_disk, load_student, student_config
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.build import load_model
from fcsd.plan import setup_for
from fcsd.plan.memory import least_disk_bytes
from fcsd.plan.model import MetaModel

SCRATCH = {"objective__kl": 0.0, "objective__sft": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``llama``: an original; ``config``: the same without weights."""
    folder = tmp_path_factory.mktemp("models")
    tiny.model("llama", initializer_range=0.1).save_pretrained(folder / "llama")
    for name in ("llama", "config"):
        (folder / name).mkdir(exist_ok=True)
        texts.tokenizer().save_pretrained(folder / name)
    (folder / "config" / "config.json").write_bytes((folder / "llama" / "config.json").read_bytes())
    return folder


def resolved(folder: Path, out: Path, start: str, **changes: Any) -> Any:
    return runs.resolved(folder, **{"model": str(folder / start), "output_dir": str(out / "run"), **changes})


@pytest.mark.parametrize("wiring", [None, "standard", "farskip", "desync-2x"])
def test_random_weights_are_the_configs_and_the_seeds(folder: Path, tmp_path: Path, wiring: str | None) -> None:
    init: dict[str, Any] = {"weights": "random", "wiring": wiring}
    if wiring == "desync-2x":
        init["gpus"] = 2
    recipes = [resolved(folder, tmp_path, "config", init=init, seed=seed).recipe for seed in (1, 1, 2)]
    one, same, other = (load_student(recipe, dtype=torch.float32, device=torch.device("cpu")) for recipe in recipes)
    weights = {name: torch.equal(p, dict(same.named_parameters())[name]) for name, p in one.named_parameters()}
    assert all(weights.values())
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert one.config.model_type == ("llama" if wiring is None else "fcsd_llama")
    assert wiring is None or (one.config.fcsd["wiring"] == wiring and one.config.fcsd["base_model"] is None)


@pytest.mark.parametrize(
    ("init", "chosen"),
    [
        ({"wiring": "farskip", "layers": "2-3"}, {"border": "full"}),
        ({"wiring": "farskip", "layers": "2-3", "border": "partial"}, {"border": "partial"}),
        ({"wiring": "ladder", "layers": "2-3", "border": "full"}, {"border": "full"}),
        ({"wiring": "desync", "gpus": 2, "reduce": "last"}, {"reduce": "last"}),
    ],
)
def test_a_recipe_chooses_border_and_reductions(folder: Path, tmp_path: Path, init: dict, chosen: dict) -> None:
    recipe = resolved(folder, tmp_path, "config", init={"weights": "random", **init}).recipe
    block = student_config(recipe, student_source(recipe)).fcsd
    assert {key: block[key] for key in chosen} == chosen


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("internvl", {}),  # transformers' own table has no causal LM of it
        ("deepseek_v2", {}),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"train__dtype": "bf16"},
        {"objective__freeze_embeddings": True, "objective__freeze_lm_head": True},
        {"optim__train": ["norms"]},
        {"optim__train": ["norms"], "train__adapter": {"rank": 2, "targets": ["attention"]}},
    ],
)
def test_a_run_and_its_plan_need_as_much_disk(
    tmp_path: Path, arch: str, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    tiny.model(arch, **changes).save_pretrained(tmp_path / "model")
    texts.tokenizer().save_pretrained(tmp_path / "model")
    init = {"wiring": "ladder"}
    recipe = runs.resolved(tmp_path, model=str(tmp_path / "model"), init=init, **settings).recipe
    source, model = student_source(recipe), MetaModel(recipe.model, rewired=True)
    found = least_disk(recipe, student_config(recipe, source), chosen_parts(recipe, source))
    assert found == least_disk_bytes(model.numbers, setup_for(recipe, 1, model))


def fcsd(*arguments: object) -> str:
    done = ranks.fcsd(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pretraining_desync_from_a_config_to_an_export(folder: Path, tmp_path: Path) -> None:
    init = {"weights": "random", "wiring": "desync-4x", "gpus": 2}
    recipe = resolved(folder, tmp_path, "config", init=init, **SCRATCH, optim__lr=1e-2, train__steps=12)
    assert "random parameters" in preview(recipe.recipe) and "desync-4x" in preview(recipe.recipe)
    run = fcsd("distill", folder / "recipe.yaml")
    metrics = read_metrics(Path(run))
    assert metrics[-1]["held_out_sft"] < 0.8 * metrics[0]["sft"] and "kl" not in metrics[0]
    assert os.path.samefile(fcsd("export", run, tmp_path / "final"), tmp_path / "final")
    block = read_config(tmp_path / "final").raw["fcsd"]
    assert (block["wiring"], block["layers"], block["tp_degree"]) == ("desync-4x", [0, 1, 2, 3], 2)


def distill(recipe: Any) -> None:
    ranks.results(1, loop.distill_model, recipe)


def test_pretraining_without_a_wiring_leaves_a_model_of_transformers(folder: Path, tmp_path: Path) -> None:
    recipe = resolved(folder, tmp_path, "config", init={"weights": "random"}, **SCRATCH, train__steps=2)
    distill(recipe)
    assert load_model(tmp_path / "run" / "final").config.model_type == "llama"


def test_an_original_rewired_on_the_way_in_is_its_conversion(folder: Path, tmp_path: Path) -> None:
    before = snapshot(folder / "llama")
    convert_checkpoint(str(folder / "llama"), tmp_path / "converted", wiring="farskip", layers="last:2", check=False)
    converted = resolved(folder, tmp_path, "llama", model=str(tmp_path / "converted"), output_dir=str(tmp_path / "a"))
    rewired = resolved(folder, tmp_path, "llama", init={"wiring": "farskip", "layers": "last:2"})
    assert teacher_name(rewired.recipe) == str(folder / "llama")
    losses = []
    for recipe in (converted, rewired):
        distill(recipe)
        losses.append([line["loss"] for line in read_metrics(Path(recipe.recipe.output_dir))])
    assert losses[0] == losses[1]
    blocks = [read_config(Path(r.recipe.output_dir) / "final").raw["fcsd"] for r in (converted, rewired)]
    assert blocks[0] == blocks[1] and blocks[0]["layers"] == [2, 3]
    assert snapshot(folder / "llama") == before


def test_starts_that_make_no_sense_are_refused(folder: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(folder / "llama"), tmp_path / "converted", check=False)
    for error, message, model, init in [
        (BadInputError, "is converted already", tmp_path / "converted", {"wiring": "ladder"}),
        (BadInputError, "has no model.safetensors", folder / "config", {}),
        (ConfigError, "records no base model", folder / "config", {"weights": "random", "wiring": "farskip"}),
        (ConfigError, "the model has 4", folder / "config", {"weights": "random", "wiring": "ladder", "layers": "7"}),
    ]:
        with pytest.raises(error, match=message):
            distill(resolved(folder, tmp_path, "config", model=str(model), init=init))
    with pytest.raises(ConfigError, match="nothing is rewired"):
        load_recipe(folder / "recipe.yaml", ["init={distance: 2}"])
    with pytest.raises(ConfigError, match="nothing is rewired"):
        load_recipe(folder / "recipe.yaml", ["init={border: partial}"])
    assert not (tmp_path / "run").exists()


def test_a_student_that_is_not_converted_yet_is_said_to_need_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = runs.resolved(tmp_path, model="runs/mine").recipe
    with pytest.raises(BadInputError, match="runs/mine") as caught:
        student_source(recipe)
    assert "create it: fcsd convert ORIGINAL runs/mine." in caught.value.hint
