"""Files are read and written under the names that they have, where transformers would save other ones."""

from pathlib import Path

import published
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import SINGLE, inspect_checkpoint, read_config, read_layout, verify_tensors
from fcsd.checkpoint.weights import loaded, names_like, stored
from fcsd.convert import convert_checkpoint
from fcsd.engine.weights import load_tensor_parallel
from fcsd.errors import BadInputError
from fcsd.models.build import load_model, wire
from fcsd.models.wiring import Wiring
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.weights.saving import own_part, write_part


@pytest.mark.parametrize("arch", published.NAMED)
def test_published_files_are_read_and_written_under_their_names(arch: str, tmp_path: Path) -> None:
    model = published.write(arch, tmp_path / "base")
    held = load_file(tmp_path / "base" / SINGLE)
    shapes = {name: tensor.shape for name, tensor in stored(model, model.state_dict()).items()}
    assert {name: tensor.shape for name, tensor in held.items()} != shapes, "or the test shows nothing"
    report = inspect_checkpoint(str(tmp_path / "base"))
    assert report.problems == [] and report.layers == 4

    convert_checkpoint(str(tmp_path / "base"), tmp_path / "out")
    wired, ids = load_model(tmp_path / "out"), tiny.tokens()
    sharded = load_tensor_parallel(tmp_path / "base", dtype=torch.float32, device="cpu", ranks=TensorGroup(None, 1, 0))
    for name, tensor in model.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], tensor), name
    with torch.no_grad():
        assert torch.equal(wired(ids).logits, wire(model, Wiring("farskip", (0, 1, 2, 3)))(ids).logits)

    (tmp_path / "again").mkdir()
    write_part(own_part(wired), tmp_path / "again", tmp_path / "out")
    written = load_file(tmp_path / "again" / SINGLE)
    assert written.keys() == held.keys() and all(torch.equal(tensor, written[name]) for name, tensor in held.items())
    verify_tensors(read_layout(tmp_path / "again"), read_config(tmp_path / "out"))


@pytest.mark.parametrize("arch", published.NAMED)
def test_what_is_stored_is_loaded_again(arch: str) -> None:
    """Also where files join several tensors, or change the order of rows."""
    model = tiny.model(arch)
    state = model.state_dict()
    again = loaded(model, stored(model, state))
    assert again.keys() == state.keys() and all(torch.equal(tensor, again[name]) for name, tensor in state.items())


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    published.write("kimi_k25", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = next(name for name in tensors if name.endswith("layers.0.input_layernorm.weight"))
    tensors["model.language_model.layers.0.input_layernorm.weight"] = tensors[name] + 1
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"1 unexpected \(\w*language_model.*norm.weight\)"):
        verify_tensors(read_layout(tmp_path), read_config(tmp_path))


def test_the_name_of_the_inner_model_is_not_added_to_layers(tmp_path: Path) -> None:
    """Files of a decoder without a head: they are refused, as no other part of fcsd would find their layers."""
    model = tiny.model("exaone_moe")
    model.save_pretrained(tmp_path)
    tensors = {name.removeprefix("model."): x for name, x in load_file(tmp_path / SINGLE).items()}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    layout = read_layout(tmp_path)
    assert names_like(model, ["model.norm.weight"], layout.tensors) == {"model.norm.weight": "norm.weight"}
    with pytest.raises(BadInputError, match=r"missing \(model.layers.0"):
        verify_tensors(layout, read_config(tmp_path))
