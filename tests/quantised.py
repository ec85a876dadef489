"""Tiny checkpoints in quantised layouts, with weights that are not zero. Numbers are packed here, not by fcsd."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    return _save(arch, path, *SCHEMES[arch])


def write_by(method: str, arch: str, path: Path) -> Path:
    """Save a tiny model of ``arch`` whose linear layers inside of the decoder layers are quantised by ``METHODS``."""
    tiny.model(arch).save_pretrained(path)
    return quantise_layers(path, *METHODS[method])


def quantise_layers(path: Path, quantise: Callable[[torch.Tensor], Tensors], block: dict[str, Any]) -> Path:
    """Quantise the linear layers inside of the decoder layers of a checkpoint, in place; see ``methods``."""

    def layer(name: str, value: torch.Tensor, random: torch.Generator) -> Tensors:
        inside = ".layers." in name and name.endswith("proj.weight")
        return {name.removesuffix("weight") + k: v for k, v in quantise(value).items()} if inside else {name: value}

    return _rewrite(path, layer, block)


def _save(arch: str, path: Path, quantise: Callable[..., Tensors], block: dict[str, Any]) -> Path:
    tiny.model(arch).save_pretrained(path)
    return _rewrite(path, quantise, block)


def _rewrite(path: Path, quantise: Callable[..., Tensors], block: dict[str, Any]) -> Path:
    random = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    parts = [quantise(name, value, random) for name, value in tensors.items()]
    whole = {k: v.contiguous() for part in parts for k, v in part.items()}
    whole = {k: v.bfloat16() if v.dtype == torch.float32 and "scale" not in k else v for k, v in whole.items()}
    save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": block, "dtype": "bfloat16"}))
    return path


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 on in int32 words, along the last dimension, the first in the lowest bits."""
    lanes = numbers.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    words = lanes.sum(-1)
    return (words - ((words >> 31) << 32)).int()


def _in_groups(
    value: torch.Tensor, bits: int, group: int, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on ``[rows, columns]``, zero points and scales ``[rows, groups]`` of a matrix."""
    shaped = value.float().unflatten(1, (-1, group))
    low, high = shaped.amin(-1).clamp(max=0), shaped.amax(-1).clamp(min=0)
    if symmetric:  # the zero point is in the middle of the codes
        low, high = -shaped.abs().amax(-1), shaped.abs().amax(-1) * (1 - 2 ** (1 - bits))
    scales = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-4)
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (shaped / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, 2**bits - 1).flatten(1), zeros, scales


def _pack(symmetric: bool, group: int) -> Callable[[torch.Tensor], Tensors]:
    def quantise(value: torch.Tensor) -> Tensors:
        shape = torch.tensor(value.shape)
        if symmetric:
            scales = (value.unflatten(1, (-1, group)).abs().amax(-1) / 7.5).bfloat16()
            codes = (value / scales.float().repeat_interleave(group, 1)).round().clamp(-8, 7) + 8
            return {"weight_packed": packed(codes, 4), "weight_scale": scales, "weight_shape": shape}
        codes, zeros, scales = _in_groups(value, 4, group)
        down = packed(zeros.T, 4).T
        held = {"weight_packed": packed(codes, 4), "weight_scale": scales.bfloat16(), "weight_shape": shape}
        return {**held, "weight_zero_point": down}

    return quantise


def _awq(group: int) -> Callable[[torch.Tensor], Tensors]:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # which column of eight is in which four bits

    def words(numbers: torch.Tensor) -> torch.Tensor:
        return packed(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    def quantise(value: torch.Tensor) -> Tensors:
        codes, zeros, scales = _in_groups(value, 4, group)
        return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.half()}

    return quantise


def _gptq(
    bits: int, offset: int, group: int, *, ordered: bool = False, symmetric: bool = False
) -> Callable[[torch.Tensor], Tensors]:
    def quantise(value: torch.Tensor) -> Tensors:
        columns = value.shape[1]
        # One order for all that read the same input, as GPTQ makes it: vLLM joins such matrices, and keeps one.
        own = torch.Generator().manual_seed(columns)
        order = torch.randperm(columns, generator=own) if ordered else torch.arange(columns)
        codes, zeros, scales = _in_groups(value[:, order], bits, group, symmetric)
        back = order.argsort()
        held = {"qweight": packed(codes[:, back], bits).T, "scales": scales.T.half(), "g_idx": (back // group).int()}
        return {**held, "qzeros": packed(zeros.T - offset, bits)}

    return quantise


def _int8(value: torch.Tensor) -> Tensors:
    scales = (value.abs().amax(1, keepdim=True) / 127).bfloat16()
    return {"weight": (value / scales.float()).round().clamp(-128, 127).to(torch.int8), "weight_scale": scales}


def _float8(
    rows: int, columns: int, suffix: str, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = ()
) -> Callable[..., Tensors]:
    """One scale for each ``rows`` x ``columns``; 0 for all of them, and then it has the shape ``shape``."""

    def quantise(value: torch.Tensor) -> Tensors:
        high, wide = rows or len(value), columns or value.shape[1]
        down, across = -(-len(value) // high), -(-value.shape[1] // wide)
        whole = torch.zeros(down * high, across * wide)
        whole[: len(value), : value.shape[1]] = value
        scales = (whole.view(down, high, across, wide).abs().amax((1, 3)) / 448).to(dtype)
        each = scales.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)[: len(value), : value.shape[1]]
        return {"weight": (value / each).to(torch.float8_e4m3fn), suffix: scales if rows else scales.reshape(shape)}

    return quantise


def _nvfp4(modelopt: bool, shared: float | None = None) -> Callable[[torch.Tensor], Tensors]:
    def quantise(value: torch.Tensor) -> Tensors:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        whole = value.abs().max() / (448 * 6) if shared is None else torch.tensor(shared)
        scales = (value.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        each = (scales.float() * whole).repeat_interleave(16, 1)
        codes = ((value / each).abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (value < 0)
        halves = (codes[:, ::2] + (codes[:, 1::2] << 4)).to(torch.uint8)
        if modelopt:
            extra = {"input_scale": torch.tensor(0.01)}  # of activations
            return {"weight": halves, "weight_scale": scales, "weight_scale_2": whole.reshape(()), **extra}
        return {"weight_packed": halves, "weight_scale": scales, "weight_global_scale": (1 / whole).reshape(1)}

    return quantise


def _compressed(form: str, *, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    head = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**head, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}  # of activations


def methods(
    group: int = 16, shared: float | None = None
) -> dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]]:
    """Name -> what stores a matrix ``[rows, columns]``, suffix -> tensor, and the ``quantization_config``.

    Args:
        group: columns that share a scale, where a method has groups of a size that one can choose.
        shared: the scale of a whole matrix in NVFP4; None for one of its own.
    """
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    fp4["scale_dtype"] = "torch.float8_e4m3fn"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}
    auto_round = {"quant_method": "auto-round", "bits": 4, "group_size": group, "sym": True, "data_type": "int"}
    return {
        "packed": (_pack(True, group), _compressed("pack-quantized", **four, symmetric=True)),
        "packed_zero_points": (_pack(False, group), _compressed("pack-quantized", **four, symmetric=False)),
        "int8": (
            _int8,
            _compressed("int-quantized", inputs=_ROWS, num_bits=8, type="int", strategy="channel", symmetric=True),
        ),
        "float8_tensor": (
            _float8(0, 0, "weight_scale", shape=(1,)),
            _compressed("float-quantized", **eight, strategy="tensor"),
        ),
        "float8_channel": (_float8(1, 0, "weight_scale"), _compressed("float-quantized", **eight, strategy="channel")),
        "float8_dynamic": (
            _float8(1, 0, "weight_scale"),
            _compressed("float-quantized", inputs={**_ROWS, "type": "float"}, **eight, strategy="channel"),
        ),
        "float8_block": (
            _float8(32, 48, "weight_scale"),
            _compressed("float-quantized", **eight, strategy="block", block_structure=[32, 48]),
        ),
        "nvfp4": (_nvfp4(False, shared), _compressed("nvfp4-pack-quantized", **fp4)),
        "awq": (
            _awq(group),
            {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True},
        ),
        "gptq": (_gptq(4, 1, group), {**gptq, "checkpoint_format": "gptq"}),
        "gptq_v2": (_gptq(4, 0, group), {**gptq, "checkpoint_format": "gptq_v2"}),
        "gptq_ordered": (_gptq(4, 1, group, ordered=True), {**gptq, "desc_act": True}),
        "gptq_symmetric": (_gptq(4, 1, group, symmetric=True), {**gptq, "sym": True}),
        "gptq_symmetric_ordered": (
            _gptq(4, 1, group, ordered=True, symmetric=True),
            {**gptq, "desc_act": True, "sym": True},
        ),
        "gptq_8_bits": (_gptq(8, 1, group), {**gptq, "bits": 8}),
        "auto_round": (_gptq(4, 1, group, symmetric=True), {**auto_round, "packing_format": "auto_round:auto_gptq"}),
        "auto_round_awq": (_awq(group), {**auto_round, "sym": False, "packing_format": "auto_round:auto_awq"}),
        "modelopt_fp8": (
            _float8(0, 0, "weight_scale", torch.float32),
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        "modelopt_nvfp4": (
            _nvfp4(True),
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        ),
        "fp8_matrix": (
            _float8(0, 0, "weight_scale_inv", torch.float32),
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        ),
    }


METHODS = methods()
