"""Linear layers whose weights stay in memory as NF4 of bitsandbytes: four bits a value, beside which adapters train.

A weight is divided into blocks of 64 values. A value is one of 16 constants times its block's largest magnitude, which
is itself rounded to 8 bits (double quantisation). The embeddings, the head and all that is not a linear layer of a
decoder layer stay as they are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from ...errors import ConfigError
from ..build import arch_of, decoder_layers, load_model, register

BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # of a value: its code, and its share of a block's scale and of that one's scale


def nf4_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers that ``load_nf4`` would load in NF4, by path. The model may be on the meta device."""
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    return {f"{prefix}.{name}": module for name, module in layers.named_modules() if type(module) is nn.Linear}


def require_nf4(model: PreTrainedModel, trained: Sequence[str], name: str, quantised: bool) -> None:
    """Refuse a model that cannot be trained beside NF4 weights.

    Args:
        model: the model, which may be on the meta device.
        trained: the names of the parameters that train themselves.
        name: the model's name, for the message.
        quantised: whether the files hold quantised weights.

    Raises:
        ConfigError: the files are quantised already, the model has routed experts, or a weight in NF4 would train.
    """
    if quantised:
        text = f"train.adapter.base nf4: the weights of {name} are quantised already, and would be rounded twice"
        raise ConfigError(text, "Remove train.adapter.base: adapters train beside the decoded weights.")
    if any(".experts." in f".{path}" for path, _ in model.named_parameters()):
        text = f"train.adapter.base nf4: {name} has routed experts, most of its weights, which are stored stacked"
        raise ConfigError(f"{text}; bitsandbytes rounds linear layers alone", "Remove train.adapter.base.")
    weights = {f"{path}.weight" for path in nf4_layers(model)}
    if stuck := next((name for name in trained if name in weights), None):
        text = f"train.adapter.base nf4: optim.train names {stuck}, and a weight of four bits cannot train"
        raise ConfigError(text, "Name norms, embeddings or head in optim.train, or remove train.adapter.base.")


def load_nf4(
    path: Path, *, dtype: torch.dtype, device: torch.device, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Load a model in eval mode, and round its weights to NF4 one at a time, on the device.

    Args:
        dtype: of the other weights, and of the products of NF4 weights.
        config: is used in place of the config in the directory.

    Raises:
        BadInputError: see ``load_model``.
    """
    config = config or AutoConfig.from_pretrained(path, trust_remote_code=False)
    register(arch_of(config).model_type)
    layers = f"{arch_of(config).classes['AutoModelForCausalLM'][1]}.layers".replace(".", r"\.")
    given = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[rf"(?!{layers}\.).*"],  # an expression for what stays as it is
    )
    model = load_model(path, dtype=dtype, device_map={"": device}, config=config, quantization_config=given)
    # The model of a run is an ordinary one, whose config is written and whose modules may be moved and exchanged.
    vars(model.config).pop("quantization_config")
    for name in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "hf_device_map"):
        vars(model).pop(name, None)
    for module in model.modules():
        if in_nf4(module):
            # On some CPUs a pass in eval mode would reorder the weight for good, and no backward pass could read it.
            vars(module)["support_avx512bf16_for_cpu"] = False
    return model


def in_nf4(layer: Any) -> bool:
    """Whether a module is a linear layer with a weight in NF4."""
    return getattr(getattr(layer, "weight", None), "quant_state", None) is not None


def plain_weight(layer: Any) -> Tensor:
    """The weight ``[out, in]`` of a linear layer, in the dtype that it had before it was rounded if it is in NF4."""
    if not in_nf4(layer):
        return layer.weight
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def plain_linear(layer: Any) -> nn.Linear:
    """A linear layer in place of one in NF4, with its bias and, on the meta device, a plain weight. It is frozen."""
    dtype = layer.weight.quant_state.dtype
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta", dtype=dtype)
    made.weight.requires_grad_(False)
    made.bias = layer.bias
    return made.train(layer.training)
