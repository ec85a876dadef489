"""A whole model with an adapter's files beside it: transformers applies the adapter, so every command refuses both."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from fcsd.checkpoint import inspect_checkpoint, open_checkpoint
from fcsd.checkpoint.location import expect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.distill.inputs import require_inputs
from fcsd.errors import BadInputError, FcsdError
from fcsd.eval.harness import evaluate_models
from fcsd.export import final
from fcsd.launch.world import World
from fcsd.models.build import load_model
from fcsd.plan.model import MetaModel
from fcsd.serve.chat import load_speaker
from fcsd.serve.server import serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A teacher, its conversion, and an adapter in the directory of each."""
    for model in runs.write_models(tmp_path, "llama"):
        (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
        shutil.copy(model / "model.safetensors", model / "adapter_model.safetensors")
    return tmp_path


def test_every_command_refuses_both_before_it_writes(folder: Path) -> None:
    model, converted, out = folder / "teacher", folder / "student", folder / "out"
    recipe, before = runs.resolved(folder).recipe, sorted(folder.rglob("*"))
    for call in (
        lambda: inspect_checkpoint(model),
        lambda: convert_checkpoint(model, out),
        lambda: final.export_model(converted, out),
        lambda: load_speaker(str(model)),
        lambda: evaluate_models([str(model)], tasks=["piqa"]),
        lambda: serve(str(converted), gpus=1, port=1, ready=print),
        lambda: require_inputs(recipe),
        lambda: MetaModel(str(model)),
        lambda: load_model(model),
    ):
        with pytest.raises(BadInputError, match=r"holds a whole model and an adapter .adapter_config.json.") as caught:
            call()
        assert "Move adapter_config.json and adapter_model.* to a directory of their own" in str(caught.value.hint)
    assert sorted(folder.rglob("*")) == before


def test_the_weights_of_an_adapter_alone_are_no_adapter_for_transformers(folder: Path) -> None:
    """Without adapter_config.json transformers leaves them alone, and so does fcsd."""
    (folder / "teacher" / "adapter_config.json").unlink()
    assert inspect_checkpoint(folder / "teacher").problems == []
    assert open_checkpoint(folder / "teacher").verify().problems() == {}


def test_a_repository_with_both_is_refused_by_its_names() -> None:
    with pytest.raises(BadInputError, match="org/model: holds a whole model and an adapter"):
        expect_checkpoint(["config.json", "model.safetensors", "adapter_config.json"], "org/model")


def test_names_that_no_command_could_open_end_a_run_at_its_first_checkpoint(tmp_path: Path) -> None:
    from fcsd.distill.student import write_student
    from fcsd.parallel.weights.saving import own_part

    teacher, _ = runs.write_models(tmp_path, "llama")
    model = load_model(teacher)
    part = own_part(model)
    renamed = replace(
        part,
        specs={f"base_model.model.{name}": spec for name, spec in part.specs.items()},
        tensors=lambda: ((f"base_model.model.{name}", value, row) for name, value, row in part.tensors()),
    )
    world = World(0, 1, model.device)
    write_student(part, teacher, tmp_path / "right", world, first=True)
    with pytest.raises(FcsdError, match=r"what the run has written does not match its config: .* base_model.model"):
        write_student(renamed, teacher, tmp_path / "wrong", world, random=True, first=True)
