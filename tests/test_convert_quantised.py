"""Quantised checkpoints: conversion rewrites no tensor, and original and converted model agree with the wiring off."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quantised
import tiny
import torch
from safetensors.torch import load_file, save_file

import fcsd.export
from fcsd.checkpoint import SINGLE, inspect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.models.build import load_model, unwired, wire
from fcsd.models.quantised.decode import plain_tensors
from fcsd.models.quantised.method import Method, read_method

ARCHS = ("llama", "qwen3_moe")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tiny.tokens(), use_cache=False).logits


def method_in(path: Path) -> Method:
    return read_method(json.loads((path / "config.json").read_text())["quantization_config"], path)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("method", quantised.METHODS)
def test_a_quantised_model_is_converted_as_it_is(method: str, arch: str, tmp_path: Path) -> None:
    base, out = quantised.write_by(method, arch, tmp_path / "base"), tmp_path / "out"
    report = inspect_checkpoint(base)
    assert report.problems == [] and report.stored_as == str(method_in(base))
    assert report.parameters == sum(tensor.numel() for tensor in tiny.model(arch).state_dict().values())
    assert convert_checkpoint(base, out, wiring="ladder", layers="last:2").parity == 4
    assert (out / SINGLE).samefile(base / SINGLE)
    own, theirs = (json.loads((path / "config.json").read_text()) for path in (out, base))
    assert own["quantization_config"] == theirs["quantization_config"]

    original, converted = load_model(base), load_model(out)
    assert converted.dtype == torch.bfloat16 and original.config.get_text_config().num_hidden_layers == 4
    assert not torch.equal(logits(converted), logits(original))
    assert torch.equal(logits(wire(converted, unwired())), logits(original))
    # The values are near those that were quantised, so that no order of columns or rows is confused.
    plain = tiny.model(arch).state_dict()
    for name, tensor in original.state_dict().items():
        if "proj" in name:
            error = (tensor.float() - plain[name]).norm() / plain[name].norm()
            assert 1e-4 < error < 0.2, (name, error)


@pytest.mark.parametrize("method", quantised.METHODS)
def test_what_is_decoded_can_be_saved_in_bf16(method: str, tmp_path: Path) -> None:
    """As the page of quantised models says, for what cannot be quantised."""
    base = quantised.write_by(method, "qwen3_moe", tmp_path / "base")
    model: Any = load_model(base)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    found = load_file(tmp_path / "plain" / SINGLE)
    expected = plain_tensors(load_file(base / SINGLE), method_in(base), torch.bfloat16)
    assert found.keys() == expected.keys() and inspect_checkpoint(tmp_path / "plain").problems == []
    assert all(torch.equal(tensor, expected[name][...]) for name, tensor in found.items())


# Of which transformers 5.23 reads experts, too; its list of what it reads is in docs/quantised_models.md.
BOTH = ("packed", "float8_tensor", "float8_channel", "fp8_matrix")
DENSE = ("int8", "float8_block", "nvfp4", "awq", "gptq", "gptq_v2", "gptq_ordered")


@pytest.mark.parametrize("method, arch", [(m, a) for m in BOTH for a in ARCHS] + [(m, "llama") for m in DENSE])
def test_off_is_off_through_the_modules_of_the_method(method: str, arch: str, tmp_path: Path) -> None:
    """transformers and the method's own library load both directories, and compute the same."""
    if "gptq" in method or method == "awq":
        pytest.importorskip("gptqmodel")
    base, out = quantised.write_by(method, arch, tmp_path / "base"), tmp_path / "out"
    convert_checkpoint(base, out, wiring="ladder", layers="last:2")
    original, converted = load_model(base, decode=False), load_model(out, decode=False)
    expected = logits(original)
    assert not torch.equal(logits(converted), expected)
    assert torch.equal(logits(wire(converted, unwired())), expected)
    difference = (logits(load_model(base)).float() - expected.float()).abs().max()
    if method in ("int8", *DENSE[3:]):  # it rounds activations, too, or computes in another order
        assert 0 < difference < 0.05 * expected.float().abs().max()
    else:
        assert difference == 0


def test_layers_of_auto_round_with_settings_of_their_own(tmp_path: Path) -> None:
    """By name and by pattern: one layer as it is, and an MLP in eight bits."""
    path = quantised.write_by("auto_round", "llama", tmp_path / "model")
    four = load_model(path).state_dict()
    eight = quantised.write_by("gptq_8_bits", "llama", tmp_path / "eight")
    plain, layer, mlp = tiny.model("llama").state_dict(), "model.layers.1.self_attn.o_proj", "model.layers.2.mlp."
    whole = {name: t for name, t in load_file(path / SINGLE).items() if not name.startswith((layer, mlp))}
    whole |= {name: t for name, t in load_file(eight / SINGLE).items() if name.startswith(mlp)}
    save_file(whole | {f"{layer}.weight": plain[f"{layer}.weight"].bfloat16()}, path / SINGLE)
    config = json.loads((path / "config.json").read_text())
    own = {layer: {"bits": 16}, r".*layers\.2\.mlp\..*": {"bits": 8, "sym": False}}
    config["quantization_config"]["extra_config"] = own
    (path / "config.json").write_text(json.dumps(config))
    found, expected = load_model(path).state_dict(), load_model(eight).state_dict()
    for name, tensor in found.items():
        right = expected[name] if name.startswith(mlp) else four[name]
        assert torch.equal(tensor, plain[name].bfloat16() if name.startswith(layer) else right), name


def test_several_schemes_in_one_config(tmp_path: Path) -> None:
    """MLPs in four bits and attention in eight, one group for each; a name counts before a class."""
    path = quantised.write_by("packed", "llama", tmp_path / "model")
    other = load_file(quantised.write_by("float8_channel", "llama", tmp_path / "other") / SINGLE)
    four, eight = load_file(path / SINGLE), {name: tensor for name, tensor in other.items() if "self_attn" in name}
    save_file({name: t for name, t in four.items() if "self_attn" not in name} | eight, path / SINGLE)
    config = json.loads((path / "config.json").read_text())
    block = config["quantization_config"]
    group = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    block["config_groups"]["group_0"] |= {"format": "pack-quantized"}
    block["config_groups"]["group_1"] = {**group, "format": "float-quantized", "targets": [r"re:.*self_attn\.\w_proj$"]}
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": block | {"format": "mixed-precision"}})
    )
    report = inspect_checkpoint(path)
    words = "8-bit floats with a scale for each row and 4-bit integers in groups of 16 (compressed-tensors)"
    assert report.problems == [] and report.stored_as == words
    assert convert_checkpoint(path, tmp_path / "out", wiring="ladder").parity == 4
    found: Any = load_model(path).state_dict()
    whole = quantised.write_by("packed", "llama", tmp_path / "four")
    for name, source in (("self_attn.q_proj", tmp_path / "other"), ("mlp.up_proj", whole)):
        expected: Any = load_model(source).state_dict()
        assert torch.equal(found[f"model.layers.1.{name}.weight"], expected[f"model.layers.1.{name}.weight"])


@pytest.mark.parametrize("arch", ARCHS)
def test_transformers_alone_loads_the_converted_directory(arch: str, tmp_path: Path) -> None:
    """In a fresh process without fcsd, by the code in the directory and the method's own library."""
    base, out = quantised.write_by("packed", arch, tmp_path / "base"), tmp_path / "out"
    convert_checkpoint(base, out, wiring="ladder", layers="last:2")
    save_file({"input_ids": tiny.tokens()}, tmp_path / "inputs")
    script = Path(fcsd.export.__file__).with_name("fresh_process.py")
    command = [sys.executable, "-P", str(script), "inputs", "logits", "1", "AutoModelForCausalLM", str(out)]
    own = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **own}, check=True, capture_output=True)
    assert torch.equal(load_file(tmp_path / "logits")["0"], logits(load_model(out)))


def test_the_file_that_modelopt_writes_beside_config_json(tmp_path: Path) -> None:
    """It stands for the part of config.json that is not there, and is copied."""
    base, out = quantised.write_by("modelopt_nvfp4", "llama", tmp_path / "base"), tmp_path / "out"
    inside = load_model(base).state_dict()
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (base / "config.json").write_text(json.dumps(config))
    details = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (base / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": details}))
    assert inspect_checkpoint(base).stored_as == "4-bit floats in groups of 16 (modelopt)"
    assert convert_checkpoint(base, out, wiring="ladder").parity == 4
    assert inspect_checkpoint(out).stored_as == "4-bit floats in groups of 16 (modelopt)"
    found = load_model(out).state_dict()
    assert all(torch.equal(tensor, inside[name]) for name, tensor in found.items())
