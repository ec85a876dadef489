"""Quantised checkpoints that cannot be right: one typed error that names the tensor, before anything is written."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import INDEX, SINGLE, inspect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError
from fcsd.models.build import load_model
from fcsd.parallel.weights.loading import verified_layout

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.self_attn.o_proj"


def spoilt(method: str, change: Callable[[Tensors], Any], path: Path) -> Path:
    """A tiny llama by ``quantised.METHODS``, one tensor of which is changed."""
    quantised.write_by(method, "llama", path)
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / SINGLE, metadata={"format": "pt"})
    return path


def set_value(suffix: str, value: float) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{suffix}"].view(-1)[-1] = value

    return change


def cut(suffix: str) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{suffix}"] = tensors[f"{LAYER}.{suffix}"][:-1]

    return change


def without(suffix: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{LAYER}.{suffix}")


NAN, INF = float("nan"), float("inf")
VALUES = [
    ("packed", set_value("weight_scale", 0), "weight_scale holds a scale of zero"),
    ("packed", set_value("weight_scale", NAN), "weight_scale holds a scale that is not finite"),
    ("int8", set_value("weight_scale", INF), "weight_scale holds a scale that is not finite"),
    ("float8_tensor", set_value("weight_scale", 0), "weight_scale holds a scale of zero"),
    ("awq", set_value("scales", NAN), "scales holds a scale that is not finite"),
    ("gptq", set_value("scales", 0), "scales holds a scale of zero"),
    ("gptq_ordered", set_value("g_idx", 4), "g_idx names group 4 of 4"),
    ("gptq_ordered", set_value("g_idx", -2), "g_idx names group -2 of 4"),
    ("gptq", set_value("qzeros", -1), "qzeros holds zero points that overflow 4 bits"),
    ("nvfp4", set_value("weight_scale", NAN), "weight_scale holds a scale that is not finite"),
    ("modelopt_nvfp4", set_value("weight_scale_2", 0), "weight_scale_2 holds a scale of zero"),
    ("fp8_matrix", set_value("weight_scale_inv", INF), "weight_scale_inv holds a scale that is not finite"),
]
SHAPES = [
    ("packed", cut("weight_packed"), f"1 wrong ({LAYER}.weight_packed is I32 [63, 8], not I32 [64, 8])"),
    ("packed_zero_points", cut("weight_zero_point"), f"1 wrong ({LAYER}.weight_zero_point is I32 [7, 4]"),
    ("awq", cut("qzeros"), f"1 wrong ({LAYER}.qzeros is I32 [3, 8], not I32 [4, 8])"),
    ("gptq", cut("scales"), f"1 wrong ({LAYER}.scales is F16 [3, 64], not F64/F32/BF16/F16 [4, 64])"),
    ("float8_block", without("weight_scale"), f"1 missing ({LAYER}.weight_scale)"),
    ("gptq_ordered", without("g_idx"), f"1 missing ({LAYER}.g_idx)"),
]


@pytest.mark.parametrize("method, change, message", [*VALUES, *SHAPES])
def test_a_tensor_that_cannot_be_right_is_named(
    method: str, change: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    path = spoilt(method, change, tmp_path / "model")
    with pytest.raises(BadInputError) as refused:
        convert_checkpoint(path, tmp_path / "out")
    assert LAYER in str(refused.value) and message in str(refused.value) and refused.value.exit_code == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"], "nothing was written"
    with pytest.raises(BadInputError, match=LAYER.replace(".", r"\.")):
        load_model(path)


def test_a_shape_in_a_tensor_is_that_of_the_model(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.weight_shape"] = torch.tensor([64, 32])

    path = spoilt("packed", change, tmp_path / "model")
    with pytest.raises(BadInputError, match=r"weight_shape says \[64, 32\], not \[64, 64\]"):
        convert_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edited(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


CONFIGS = [
    ("packed", {"ignore": ["model.layers.7.mlp"]}, "ignores model.layers.7.mlp, which names nothing"),
    (
        "packed",
        {"ignore": [LAYER]},
        f"{LAYER}.weight: the files hold it quantised, and quantization_config ignores",
    ),
    ("packed", {"ignore": [r"re:.*layers\.1\.self_attn.*"]}, "quantised, and quantization_config ignores re:"),
    ("packed", {"ignore": ["re:(("]}, "is no pattern that can be used"),
    ("awq", {"quant_method": "gptq", "desc_act": False}, "qweight is I32 [64, 8], not I32 [8, 64]"),
    ("gptq", {"quant_method": "fp8"}, "no tensor is quantised as config.json says: 8-bit floats"),
    ("modelopt_nvfp4", {"quant_algo": "FP8"}, "no tensor is quantised as config.json says: 8-bit floats"),
    ("packed", {"format": "marlin-24"}, "'compressed-tensors' (marlin-24, 4-bit integers by group) is not supported"),
    ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config (sparse-24-bitmask)"),
    ("awq", {"version": "gemv"}, "'awq' (4 bits, version gemv, zero_point True) is not supported"),
    (
        "auto_round",
        {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"},
        "'auto-round' (packing_format auto_round:llm_compressor, data_type mx_fp, act_bits 16) is not supported",
    ),
    ("auto_round", {"act_bits": 8}, "data_type int, act_bits 8) is not supported"),
    ("auto_round", {"rotation_config": {"type": "hadamard"}}, "act_bits 16, rotation_config) is not supported"),
    ("auto_round_awq", {"bits": 8}, "'auto-round' (8 bits, auto_round:auto_awq) is not supported"),
    ("auto_round", {"extra_config": {LAYER: {"bits": 16}}}, f"{LAYER}.weight: the files hold it quantised"),
]


@pytest.mark.parametrize("method, changes, message", CONFIGS)
def test_a_config_that_contradicts_the_files_is_refused(
    method: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = edited(quantised.write_by(method, "llama", tmp_path / "model"), **changes)
    with pytest.raises(BadInputError) as refused:
        convert_checkpoint(path, tmp_path / "out")
    assert message in str(refused.value) and not (tmp_path / "out").exists()
    if "names nothing" not in message:  # which changes no value
        with pytest.raises(BadInputError):
            load_model(path)


def test_a_pattern_may_name_nothing(tmp_path: Path) -> None:
    """It was written for many models."""
    path = edited(quantised.write_by("packed", "llama", tmp_path), ignore=["lm_head", "re:.*vision.*"])
    assert inspect_checkpoint(path).problems == []


def test_a_pattern_cannot_take_long(tmp_path: Path) -> None:
    path = edited(quantised.write_by("packed", "llama", tmp_path), ignore=[r"re:(.|.|.)+[!?]$"])
    with pytest.raises(BadInputError, match="is no pattern that can be used"):
        inspect_checkpoint(path)


def test_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    """A layer that is quantised in one shard and plain in another; a shard that lacks the scale that the index has."""
    path = quantised.write_by("packed", "llama", tmp_path / "model")
    tensors = load_file(path / SINGLE)
    (path / SINGLE).unlink()
    first = {name: tensor for name, tensor in tensors.items() if LAYER not in name}
    second = {name: tensor for name, tensor in tensors.items() if LAYER in name}
    weight_map = {name: "a.safetensors" for name in first} | {name: "b.safetensors" for name in second}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    save_file(first, path / "a.safetensors")
    scale = second.pop(f"{LAYER}.weight_scale")
    save_file(second, path / "b.safetensors")
    with pytest.raises(BadInputError, match=r"b\.safetensors lacks .*o_proj\.weight_scale"):
        convert_checkpoint(path, tmp_path / "out")
    save_file(
        {**second, f"{LAYER}.weight_scale": scale, f"{LAYER}.weight": torch.zeros(64, 64)}, path / "b.safetensors"
    )
    weight_map[f"{LAYER}.weight"] = "b.safetensors"
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadInputError, match=r"1 unexpected .*o_proj\.weight\)"):
        convert_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_read_names_its_algorithm_and_a_way_out(tmp_path: Path) -> None:
    """The release to look for has the name without its format, also in the hub's cache."""
    base = quantised.write_by("awq", "llama", tmp_path / "base")
    block = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for folder in ("Qwen3-8B-bnb-4bit", "models--org--Qwen3-8B-AWQ/snapshots/0123"):
        path = tmp_path / folder
        path.mkdir(parents=True)
        config = json.loads((base / "config.json").read_text()) | {"quantization_config": block}
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(BadInputError, match="quantisation 'bitsandbytes' is not supported") as refused:
            inspect_checkpoint(path)
        assert "Look for Qwen3-8B in bf16" in (refused.value.hint or "")
        assert "Supported: auto-round, awq, compressed-tensors," in (refused.value.hint or "")


def test_the_line_of_the_hint_writes_a_copy_in_bf16(tmp_path: Path) -> None:
    """Of a model that cannot be divided because it is quantised; its words are run as they are printed."""
    path = quantised.write_by("gptq", "qwen3_moe", tmp_path / "model")
    with pytest.raises(BadInputError, match=r"is quantised .gptq., and this cannot load that") as refused:
        verified_layout(path, "this")
    command = (refused.value.hint or "").split('-c "')[1].split('"')[0]
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True, capture_output=True)
    assert verified_layout(tmp_path / "OUT", "this").tensors.keys() > {"model.layers.1.mlp.experts.0.down_proj.weight"}
    assert inspect_checkpoint(tmp_path / "OUT").dtypes.keys() == {"BF16"}
