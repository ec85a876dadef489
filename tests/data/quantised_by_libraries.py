"""Writes quantised_by_libraries.safetensors: small matrices that published libraries quantised and dequantised.

Each case has the ``quantization_config`` of a checkpoint in the file's metadata, the tensors as files have them, and
what the library makes of them. It was run with compressed-tensors 0.20.1, GPTQModel 7.7.0 (unpacked source), AutoAWQ
0.2.9, Model Optimizer 0.47.0 and AutoRound 0.15.1 in a folder SITE of their own, on a CPU:

    PYTHONPATH=SITE:SITE/gptqmodel-7.7.0 python tests/data/quantised_by_libraries.py
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROWS, COLUMNS = 48, 96
RANDOM = torch.Generator().manual_seed(0)
CONFIGS: dict[str, dict[str, Any]] = {}
TENSORS: dict[str, torch.Tensor] = {}


def keep(case: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], values: torch.Tensor) -> None:
    CONFIGS[case] = config
    named = {**tensors, "expected": values}
    TENSORS.update({f"{case}.{suffix}": tensor.detach().clone().contiguous() for suffix, tensor in named.items()})


def matrix(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(ROWS, COLUMNS, generator=RANDOM) * 0.1).to(dtype)


def compressed(case: str, form: str, weights: dict[str, Any], scales: torch.dtype = torch.bfloat16) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight, strategy, height, width = matrix(), args.strategy, 1, COLUMNS
    if strategy in ("group", "tensor_group"):
        width = args.group_size
    elif strategy == "tensor":
        height = ROWS
    elif strategy == "block":
        height, width = args.block_structure
    down, across = -(-ROWS // height), -(-COLUMNS // width)
    padded = torch.nn.functional.pad(weight, (0, across * width - COLUMNS, 0, down * height - ROWS))
    blocks = padded.view(down, height, across, width).float()
    more: dict[str, torch.Tensor] = {}
    if strategy == "tensor_group":
        more["weight_global_scale"] = (448 * 6 / weight.abs().max().float()).reshape(1)
    scale, zero = calculate_qparams(
        blocks.amin((1, 3)).to(scales), blocks.amax((1, 3)).to(scales), args, more.get("weight_global_scale")
    )
    if strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale, **more}
    if not args.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(dict(state), scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    keep(case, config, {name: t for name, t in stored.items() if isinstance(t, torch.Tensor)}, values)


def awq() -> None:
    import awq

    where = Path(awq.__path__[0], "utils", "packing_utils.py")  # alone: the package needs a GPU
    spec: Any = importlib.util.spec_from_file_location("packing_utils", where)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    for case, group in [("awq", 32), ("awq_one_group", -1)]:
        width = COLUMNS if group == -1 else group
        words = torch.randint(-(2**31), 2**31, (COLUMNS, ROWS // 8), generator=RANDOM).to(torch.int32)
        zeros = torch.randint(-(2**31), 2**31, (COLUMNS // width, ROWS // 8), generator=RANDOM).to(torch.int32)
        scales = (torch.rand(COLUMNS // width, ROWS, generator=RANDOM) * 0.01 + 1e-4).half()
        values = library.dequantize_gemm(words, zeros, scales, 4, width).T
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        keep(case, config, {"qweight": words, "qzeros": zeros, "scales": scales}, values)


def gptq(case: str, bits: int, group: int, form: str, ordered: bool) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    width = COLUMNS if group == -1 else group
    layer: Any = TorchLinear(
        bits=bits, group_size=group, sym=False, desc_act=ordered, in_features=COLUMNS, out_features=ROWS, bias=False
    )
    groups = torch.arange(COLUMNS) // width
    order = groups[torch.randperm(COLUMNS, generator=RANDOM)] if ordered else groups
    top = 2**bits - 1
    codes = torch.randint(0, top + 1, (COLUMNS, ROWS), generator=RANDOM)
    zeros = torch.randint(0, top, (COLUMNS // width, ROWS), generator=RANDOM)  # one less than the most, for version 1
    shifts = torch.arange(0, 32, bits)
    words = (codes.view(-1, 32 // bits, ROWS) << shifts[None, :, None]).sum(1).to(torch.int32)
    packed = (zeros.view(len(zeros), -1, 32 // bits) << shifts).sum(-1).to(torch.int32)
    scales = (torch.rand(len(zeros), ROWS, generator=RANDOM) * 0.01 + 1e-4).half()
    stored = {"qweight": words, "qzeros": packed, "scales": scales, "g_idx": order.to(torch.int32)}
    for name, tensor in stored.items():
        getattr(layer, name).data = tensor.clone()
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.post_init()
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    keep(case, {**config, "checkpoint_format": form}, stored, layer.dequantize_weight().T)


def modelopt() -> None:
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    eight, scale = FP8QTensor.quantize(matrix())
    values = eight.dequantize(torch.bfloat16, scale=scale)
    stored = {"weight": eight._quantized_data, "weight_scale": scale.float().reshape(())}
    keep("modelopt_fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, stored, values)
    four, scale, whole = NVFP4QTensor.quantize(matrix(), 16)
    values = four.dequantize(torch.bfloat16, scale=scale, double_scale=whole, block_sizes={-1: 16})
    stored = {"weight": four._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    keep("modelopt_nvfp4", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, stored, values)


def auto_round(case: str, bits: int, packing: str) -> None:
    """A matrix by AutoRound's own packer. Its layer, asked for the rows of an identity, says what it decodes."""
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing

    rows = 64  # it packs 32 at a time
    random = torch.Generator().manual_seed(len(CONFIGS))
    linear = torch.nn.Linear(COLUMNS, rows, bias=False)
    linear.weight.data = torch.randn(rows, COLUMNS, generator=random) * 0.1
    scales = torch.rand(rows, COLUMNS // 32, generator=random) * 0.01 + 0.03
    zeros = torch.randint(1, 2**bits, (rows, COLUMNS // 32), generator=random).float()
    kind: Any = dynamic_import_quant_linear_for_packing(packing, bits, 32, False)
    layer = kind(bits, 32, COLUMNS, rows, False)
    low, high = -zeros * scales, (2**bits - 1 - zeros) * scales  # its tuning keeps values inside of these
    linear.weight.data.clamp_(low.repeat_interleave(32, 1), high.repeat_interleave(32, 1))
    layer.device = "cpu"  # where it packs
    layer.pack(linear, scales, zeros.clone())
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx") if hasattr(layer, name)}
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": False, "data_type": "int"}
    layer.post_init()
    keep(case, {**config, "packing_format": packing}, stored, layer(torch.eye(COLUMNS).half()).T)


def main() -> None:
    four = {"num_bits": 4, "type": "int"}
    grouped = {**four, "strategy": "group", "group_size": 32}
    compressed("packed", "pack-quantized", {**grouped, "symmetric": True})
    compressed("packed_zero_points", "pack-quantized", {**grouped, "symmetric": False})
    compressed("packed_half", "pack-quantized", {**grouped, "symmetric": False}, torch.float16)
    compressed("packed_channel", "pack-quantized", {**four, "strategy": "channel", "symmetric": True})
    compressed("packed_channel_zero_points", "pack-quantized", {**four, "strategy": "channel", "symmetric": False})
    compressed("packed_3_bits", "pack-quantized", {**grouped, "num_bits": 3, "symmetric": False})
    compressed("packed_8_bits", "pack-quantized", {**grouped, "num_bits": 8, "symmetric": False})
    eight = {"num_bits": 8, "type": "int"}
    compressed("int8", "int-quantized", {**eight, "strategy": "channel", "symmetric": True})
    compressed("int8_zero_points", "int-quantized", {**eight, "strategy": "channel", "symmetric": False})
    compressed("int8_tensor", "int-quantized", {**eight, "strategy": "tensor", "symmetric": True})
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    compressed("float8_tensor", "float-quantized", {**float8, "strategy": "tensor"})
    compressed("float8_channel", "float-quantized", {**float8, "strategy": "channel"})
    compressed("float8_channel_full", "float-quantized", {**float8, "strategy": "channel"}, torch.float32)
    compressed("float8_block", "float-quantized", {**float8, "strategy": "block", "block_structure": [32, 64]})
    four_floats = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    four_floats["scale_dtype"] = "torch.float8_e4m3fn"
    compressed("nvfp4", "nvfp4-pack-quantized", four_floats)
    awq()
    gptq("gptq", 4, 32, "gptq", False)
    gptq("gptq_v2", 4, 32, "gptq_v2", False)
    gptq("gptq_ordered", 4, 32, "gptq", True)
    gptq("gptq_one_group", 4, -1, "gptq", False)
    gptq("gptq_8_bits", 8, 32, "gptq", True)
    modelopt()
    auto_round("auto_round", 4, "auto_round:auto_gptq")
    auto_round("auto_round_gptqmodel", 4, "auto_round:gptqmodel")
    auto_round("auto_round_3_bits", 3, "auto_round:auto_gptq")
    auto_round("auto_round_own", 8, "auto_round")
    target = Path(__file__).with_suffix(".safetensors")
    save_file(TENSORS, target, metadata={case: json.dumps(config) for case, config in CONFIGS.items()})
    print(f"{target}: {len(CONFIGS)} cases")


if __name__ == "__main__":
    main()
