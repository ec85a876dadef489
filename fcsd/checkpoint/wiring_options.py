"""Makes a wiring from the name, layers and options that a user gives, and checks that it fits the checkpoint."""

from difflib import get_close_matches
from typing import Any

import torch

from fcsd.checkpoint.config_json import CheckpointConfig
from fcsd.errors import ConfigError
from fcsd.models.archs import Arch
from fcsd.models.build import check_desync, config_class, model_classes
from fcsd.models.selection import select_layers
from fcsd.models.wiring_block import Wiring


def choose_wiring(config: CheckpointConfig, arch: Arch, name: str, layers: str, **fields: Any) -> Wiring:
    """The wiring that the options of ``convert`` ask for. It is applied to a model on the meta device as a check.

    Args:
        config: the config of the original.
        arch: the architecture's row.
        name: the name of the wiring.
        layers: see ``fcsd.models.selection.select_layers``.
        fields: further fields of ``Wiring``; a field that is None takes its default.

    Raises:
        ConfigError: the wiring does not fit the model, or its options do not go together.
    """
    if name not in arch.wirings:
        guess = "".join(f"Did you mean {close}? " for close in get_close_matches(name, arch.wirings, n=1))
        raise ConfigError(f"{arch.model_type} has no wiring {name!r}", f"{guess}One of {', '.join(arch.wirings)}.")
    if fields.get("border") and fields.get("variant") == "mlp-only":
        raise ConfigError(f"{name} mlp-only has no border: its attention reads the full stream", "Leave out --border.")
    try:
        chosen = {key: value for key, value in fields.items() if value is not None}
        wiring = Wiring(name, select_layers(layers, config.text["num_hidden_layers"]), **chosen)
        cls = model_classes(arch.model_type)["AutoModelForCausalLM"]
        raw = {key: value for key, value in config.raw.items() if key not in ("model_type", "quantization_config")}
        with torch.device("meta"):
            model = cls(config_class(arch.model_type).from_dict({**raw, "fcsd": wiring.to_block()}))
        check_desync(model.config, wiring)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return wiring
