"""Tiny checkpoints in the two quantised layouts, with weights that are not zero."""

import json
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def _mxfp4(name: str, value: torch.Tensor, random: torch.Generator) -> Tensors:
    """GPT-OSS: the experts' matrices [experts, in, out] as blocks of 32 four-bit values and their scales."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value.bfloat16()}
    experts, inner, outer = value.shape
    scales = torch.randint(118, 124, (experts, outer, inner // 32), generator=random, dtype=torch.uint8)
    blocks = torch.randint(0, 256, (*scales.shape, 16), generator=random, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _fp8(name: str, value: torch.Tensor, random: torch.Generator) -> Tensors:
    """DeepSeek-V3: matrices in eight bits, with a scale for each block of 128 x 128."""
    if not name.endswith("proj.weight"):
        return {name: value.bfloat16()}
    blocks = [-(-size // 128) for size in value.shape]
    return {name: (value * 100).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full(blocks, 0.01)}


SCHEMES = {
    "gpt_oss": (_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
    "deepseek_v3": (_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
}


def write(arch: str, path: Path) -> Path:
    """Save a tiny model of ``arch``, quantised as its family publishes it."""
    quantise, block = SCHEMES[arch]
    tiny.model(arch).save_pretrained(path)
    random = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    parts = [quantise(name, value, random) for name, value in tensors.items()]
    save_file({k: v for part in parts for k, v in part.items()}, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": block, "dtype": "bfloat16"}))
    return path
