"""Writes checkpoints of any size as sparse files: real names, shapes and headers, but weights without disk space."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from fcsd.checkpoint.weights import stored

BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def write(path: Path, config: Any, cls: str, shards: int = 50, quantize: str | None = None) -> Path:
    """Write the files that ``save_pretrained`` of a bf16 model of this config would write, with every weight zero.

    Args:
        path: directory to make.
        config: a transformers config.
        cls: name of the transformers model class.
        shards: number of weights files.
        quantize: ``mxfp4`` (GPT-OSS) or ``fp8`` (DeepSeek-V3, blocks of 128 x 128) for their layouts.
    """
    with torch.device("meta"):
        model = getattr(transformers, cls)(config)
    state = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    shapes = {name: tuple(value.shape) for name, value in stored(model, state).items()}
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    config.architectures = [cls]
    fields = config.to_dict()
    if quantize:
        tensors = {"mxfp4": _mxfp4, "fp8": _fp8}[quantize](shapes)
        fields["quantization_config"] = {
            "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
            "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        }[quantize]

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields, indent=2))
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {
            name: tensors[name] for name in names[index * len(names) // shards : (index + 1) * len(names) // shards]
        }
        write_header(path / file, part)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def write_header(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file of zeros. Only its header takes disk space."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + BYTES[dtype] * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def scout(path: Path, shards: int = 50) -> Path:
    """Write a checkpoint with Llama-4-Scout's shapes: 109 B parameters, 217 GB that take no disk space."""
    return write(path, transformers.Llama4Config(), "Llama4ForConditionalGeneration", shards)


def _mxfp4(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = shape
            tensors[name + "_blocks"] = ("U8", (experts, outer, inner // 32, 16))
            tensors[name + "_scales"] = ("U8", (experts, outer, inner // 32))
        else:
            tensors[name] = ("BF16", shape)
    return tensors


def _fp8(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("proj.weight") or "kv_a_proj" in name:
            tensors[name] = ("F8_E4M3", shape)
            tensors[name + "_scale_inv"] = ("F32", tuple(-(-size // 128) for size in shape))
        else:
            tensors[name] = ("BF16", shape)
    return tensors
