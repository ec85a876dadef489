"""Which teacher: the student's original, unless the recipe says otherwise; one that moved or changed is noticed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import texts
import tiny
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import fingerprint, read_layout
from fcsd.convert import convert_checkpoint
from fcsd.distill import loop
from fcsd.distill.teacher.targets import identify_teacher, output_head, weights_sha256
from fcsd.errors import BadInputError, CheckpointError, ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A teacher and its conversion by ``fcsd convert``, which records the teacher's fingerprint."""
    tiny.model("llama", initializer_range=0.1).save_pretrained(tmp_path / "teacher")
    texts.tokenizer().save_pretrained(tmp_path / "teacher")
    convert_checkpoint(str(tmp_path / "teacher"), tmp_path / "student", check=False)
    return tmp_path


def recipe(folder: Path, **changes: Any) -> Any:
    return runs.resolved(folder, output_dir=str(folder / "run"), **changes)


def perturb(directory: Path) -> None:
    """Another value in one tensor of a copy: the same names, shapes and file sizes."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"].flatten()[:4] += 1
    file.unlink()  # linked with the student's
    save_file(tensors, file, metadata={"format": "pt"})


def test_the_original_is_recognised_wherever_it_is(folder: Path) -> None:
    found = identify_teacher(recipe(folder).recipe)
    (folder / "teacher").rename(folder / "elsewhere")
    with pytest.raises(BadInputError, match="no such directory") as gone:
        identify_teacher(recipe(folder).recipe)
    assert gone.value.hint is not None and "set `teacher:`" in gone.value.hint
    assert identify_teacher(recipe(folder, teacher=str(folder / "elsewhere")).recipe) == found


def test_a_changed_teacher_is_refused_by_both_hashes_and_can_be_accepted(folder: Path) -> None:
    original = fingerprint(read_layout(folder / "teacher"))
    config = folder / "teacher" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-3}))
    changed = fingerprint(read_layout(folder / "teacher"))
    (result,) = ranks.on_ranks(1, loop.distill_model, recipe(folder))
    assert isinstance(result, BadInputError)
    assert original in str(result) and changed in str(result) and changed in str(result.hint)
    assert not (folder / "run").exists()
    assert identify_teacher(recipe(folder, teacher_sha256=changed).recipe)["teacher.fingerprint"] == changed
    with pytest.raises(BadInputError, match="the recipe asks for 0000"):
        identify_teacher(recipe(folder, teacher_sha256="0" * 64).recipe)


def test_new_weights_under_the_old_headers_are_noticed_on_resume(folder: Path) -> None:
    started = recipe(folder, train__steps=2)
    assert ranks.on_ranks(1, loop.distill_model, started) == [folder / "run"]
    before = weights_sha256(read_layout(folder / "teacher"))
    perturb(folder / "teacher")
    assert weights_sha256(read_layout(folder / "teacher")) != before
    shutil.rmtree(folder / "run" / "final")
    (result,) = ranks.on_ranks(1, loop.distill_model, started)
    assert isinstance(result, CheckpointError) and "teacher.sample was" in str(result)


def test_a_teacher_is_identified_by_every_byte_of_its_weights(folder: Path) -> None:
    layout = read_layout(folder / "teacher")
    tensor = max(layout.tensors.values(), key=lambda tensor: tensor.end - tensor.start)
    assert tensor.end - tensor.start > 1 << 13
    before = weights_sha256(layout)
    (file,) = layout.files.values()
    with file.open("r+b") as weights:
        weights.seek(tensor.end - 1)
        (last,) = weights.read(1)
        weights.seek(tensor.end - 1)
        weights.write(bytes([last ^ 1]))
    assert weights_sha256(layout) != before
    assert identify_teacher(recipe(folder).recipe)["teacher.sample"] == weights_sha256(layout)


def test_a_head_with_a_bias_is_refused_because_losses_would_leave_it_out() -> None:
    assert output_head(tiny.model("ernie4_5_moe")).shape == (tiny.VOCAB, 64)
    with pytest.raises(ConfigError, match="output head of this model has a bias"):
        output_head(tiny.model("ernie4_5_moe", use_bias=True))
