"""Quantised checkpoints are read as their layout says: compared with dequantisations that are written here."""

import json
from pathlib import Path
from typing import Any

import pytest
import quantised
import tiny
import torch
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import SINGLE, read_config, read_layout, verify_tensors
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError
from fcsd.export.final import export_model
from fcsd.models.archs import ARCHS
from fcsd.models.build import load_model
from fcsd.models.quantised.layouts import Scheme
from fcsd.models.quantised.values import dequantise
from fcsd.parity import first_layers

Tensors = dict[str, torch.Tensor]


def write_fp8(path: Path, block: tuple[int, int]) -> Tensors:
    """A tiny deepseek_v3 in fp8 with blocks of any size, whose scales all differ; its weights as they should be read.

    Every value is multiplied by the scale at its row and column divided by the block, one after the other.
    """
    tiny.model("deepseek_v3", initializer_range=0.3).save_pretrained(path)
    random = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    expected: Tensors = {}
    for name, value in load_file(path / SINGLE).items():
        if not name.endswith("proj.weight") and "kv_a_proj_with_mqa" not in name:
            stored[name] = expected[name] = value.bfloat16()
            continue
        rows, columns = value.shape
        grid = [-(-rows // block[0]), -(-columns // block[1])]
        scales = torch.rand(grid, generator=random) * 0.02 + 0.001
        eight = (value * 100).to(torch.float8_e4m3fn)
        stored |= {name: eight, f"{name}_scale_inv": scales}
        row, column = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
        expected[name] = (eight.float() * scales[row[:, None], column[None, :]]).bfloat16()
    save_file(stored, path / SINGLE, metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings, "dtype": "bfloat16"}))
    return expected


def plain_logits(arch: str, weights: Tensors, path: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of an ordinary bf16 checkpoint with these weights."""
    tiny.model(arch, dtype=torch.bfloat16).save_pretrained(path)
    save_file({name: value.contiguous() for name, value in weights.items()}, path / SINGLE, metadata={"format": "pt"})
    with torch.no_grad():
        return load_model(path, dtype=torch.bfloat16, experts_implementation="eager")(ids).logits


def loaded_twice(path: Path, arch: str) -> list[Any]:
    """The model as ``load_model`` reads it, and as the proofs of ``convert`` and ``export`` do."""
    layout, config = read_layout(path), read_config(path)
    verify_tensors(layout, config)
    whole = first_layers(path, list(layout.files.values()), config, ARCHS[arch], 4)
    return [load_model(path, dtype=torch.bfloat16, experts_implementation="eager"), whole]


# 24 rows of kv_a_proj_with_mqa: blocks of 10 give three scales, which divide 24 and would be read as 8 + 8 + 8;
# blocks of 128 are larger than every matrix.
@pytest.mark.parametrize("block", [(10, 48), (16, 16), (48, 7), (128, 128)])
def test_fp8_blocks_are_those_of_the_config(block: tuple[int, int], tmp_path: Path) -> None:
    expected = write_fp8(tmp_path / "fp8", block)
    ids = tiny.tokens()
    logits = plain_logits("deepseek_v3", expected, tmp_path / "plain", ids)
    for model in loaded_twice(tmp_path / "fp8", "deepseek_v3"):
        for name in ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.o_proj.weight", "self_attn.q_a_proj.weight"):
            name = f"model.layers.1.{name}"
            assert torch.equal(model.state_dict()[name], expected[name]), name
        with torch.no_grad():
            assert torch.equal(model(ids).logits, logits)
    assert convert_checkpoint(tmp_path / "fp8", tmp_path / "converted").parity == 4
    again: Any = load_model(tmp_path / "converted", dtype=torch.bfloat16)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(again.state_dict()[name], expected[name])
    if block in [(10, 48), (16, 16), (48, 7)]:  # transformers alone would read other values, or none
        with pytest.raises(BadInputError, match="misreads the fp8 blocks of"):
            export_model(tmp_path / "converted", tmp_path / "exported")
        assert not (tmp_path / "exported").exists()


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, (10, 48))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [10, 32]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="weight_scale_inv"):
        verify_tensors(read_layout(tmp_path), read_config(tmp_path))
    with pytest.raises(BadInputError):
        load_model(tmp_path)


def test_dequantising_a_stack_of_matrices() -> None:
    """Also on the last dimensions of experts, and for one value alone."""
    values = torch.randn(3, 5, 7).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, 2)
    expected = torch.empty(3, 5, 7)
    for expert in range(3):
        for row in range(5):
            for column in range(7):
                expected[expert, row, column] = (
                    values[expert, row, column].float() * scales[expert, row // 2, column // 4]
                )
    tensors, scheme = {"weight": values, "weight_scale_inv": scales}, Scheme("inverse", 8, (2, 4), floats=True)
    assert torch.equal(dequantise(scheme, tensors, torch.float32), expected)
    with pytest.raises(ValueError, match="5 x 7 values in blocks of"):
        dequantise(Scheme("inverse", 8, (2, 8), floats=True), tensors)


def test_mxfp4_is_read_as_its_format_says(tmp_path: Path) -> None:
    """Two four-bit floats in a byte, the lower half first; 32 of them share the exponent of one byte."""
    path = quantised.write("gpt_oss", tmp_path / "mxfp4")
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected: Tensors = {}
    for name, value in load_file(path / SINGLE).items():
        if name.endswith("_scales"):
            continue
        if not name.endswith("_blocks"):
            expected[name] = value
            continue
        scales = load_file(path / SINGLE)[name.removesuffix("_blocks") + "_scales"]
        halves = torch.stack([value & 15, value >> 4], -1).flatten(-2)  # [experts, out, blocks, 32]
        numbers = table[halves.long()] * torch.exp2(scales.float() - 127)[..., None]
        expected[name.removesuffix("_blocks")] = numbers.flatten(-2).transpose(1, 2).bfloat16()
    ids = tiny.tokens()
    logits = plain_logits("gpt_oss", expected, tmp_path / "plain", ids)
    for model in loaded_twice(path, "gpt_oss"):
        for name in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{name}"
            assert torch.equal(model.state_dict()[name], expected[name]), name
        with torch.no_grad():
            assert torch.equal(model(ids).logits, logits)


def test_a_width_that_mxfp4_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = quantised.write("gpt_oss", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(BadInputError, match="48 values cannot be stored in MXFP4 blocks of 32"):
        verify_tensors(read_layout(path), read_config(path))
