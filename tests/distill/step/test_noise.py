"""What a config makes random in training is off for the student, as for the teacher; layers are recomputed."""

import json
from pathlib import Path

import pytest
import runs
import tiny
import torch
from torch import nn

from fcsd.distill.step.engine import recompute_layers, switch_off_noise
from fcsd.models.build import wire
from fcsd.models.wiring import Wiring


def noisy(arch: str) -> nn.Module:
    """A model whose config has every dropout and jitter that its class knows."""
    fields = tiny.config(arch).get_text_config().to_dict()
    changes = {name: 0.5 for name in fields if "dropout" in name or "jitter" in name or name.endswith("pdrop")}
    assert changes
    return tiny.model(arch, attn_implementation="eager", **changes).train()


NO_NOISE = ("ernie4_5", "lfm2")


@pytest.mark.parametrize("arch", [arch for arch in tiny.CONFIGS if not arch.startswith(NO_NOISE)])
def test_in_training_the_student_computes_what_it_computes_in_evaluation(arch: str) -> None:
    model, ids = noisy(arch), tiny.tokens()
    wire(model, Wiring("farskip", (1, 2, 3)))  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits), "the config does not make it random"
        switch_off_noise(model)
        assert model.training
        trained = model(ids, use_cache=False).logits
        assert torch.equal(trained, model.eval()(ids, use_cache=False).logits)


def test_the_routers_jitter_alone_is_switched_off() -> None:
    model, ids = tiny.model("mixtral", router_jitter_noise=0.5).train(), tiny.tokens()
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
        switch_off_noise(model)
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.config.router_jitter_noise == 0.5, "the config is saved as it was"


def test_a_dropout_module_is_switched_off() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5)).train()
    switch_off_noise(module)
    assert torch.equal(module(torch.ones(8, 8)), torch.ones(8, 8))


def test_a_run_is_the_same_whatever_noise_the_students_config_has(tmp_path: Path) -> None:
    for name, noise in (("without", 0.0), ("with", 0.5)):
        (tmp_path / name).mkdir()
        runs.write_models(tmp_path / name, "mixtral")
        path = tmp_path / name / "student" / "config.json"
        raw = json.loads(path.read_text()) | {"attention_dropout": noise, "router_jitter_noise": noise}
        path.write_text(json.dumps(raw))
    recipes = [runs.resolved(tmp_path / name, train__steps=2) for name in ("without", "with")]
    runs.train_all(recipes)
    found = [runs.outcome(tmp_path / name / "run") for name in ("without", "with")]
    assert found[0] == found[1]
    final = json.loads((tmp_path / "with" / "run" / "final" / "config.json").read_text())
    assert final["attention_dropout"] == final["router_jitter_noise"] == 0.5


@pytest.mark.filterwarnings("error")
def test_layers_are_recomputed_without_a_warning() -> None:
    model = tiny.model("llama")
    recompute_layers(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
