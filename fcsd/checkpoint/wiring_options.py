"""Makes a wiring from the name, layers and options that a user gives, and checks that it fits the checkpoint."""

import logging
from difflib import get_close_matches
from typing import Any

from fcsd.checkpoint.config_json import AMD_KEYS, CheckpointConfig
from fcsd.checkpoint.files import with_floats
from fcsd.errors import ConfigError
from fcsd.models.arch import Arch
from fcsd.models.selection import layers_text, select_layers
from fcsd.models.wiring_block import Wiring

log = logging.getLogger(__name__)


def asked_wiring(config: CheckpointConfig, arch: Arch, name: str, layers: str, **fields: Any) -> Wiring:
    """The wiring that the options of ``convert`` ask for, by config.json alone: torch is not imported.

    Args:
        layers: see ``fcsd.models.selection.select_layers``.
        fields: further fields of ``Wiring``; a field that is None takes its default.

    Raises:
        ConfigError: the architecture has no such wiring or layers, or its options do not go together.
    """
    if config.foreign:
        name, layers, fields = _as_trained(config, name, layers, fields)
    if name not in arch.wirings:
        guess = "".join(f"Did you mean {close}? " for close in get_close_matches(name, arch.wirings, n=1))
        raise ConfigError(f"{arch.model_type} has no wiring {name!r}", f"{guess}One of {', '.join(arch.wirings)}.")
    if fields.get("border") and fields.get("variant") == "mlp-only":
        raise ConfigError(f"{name} mlp-only has no border: its attention reads the full stream", "Leave out --border.")
    try:
        chosen = {key: value for key, value in fields.items() if value is not None}
        return Wiring(name, select_layers(layers, config.text["num_hidden_layers"]), **chosen)
    except ValueError as error:
        hint = "--gpus, in a recipe init.gpus, is the tp_degree." if "tp_degree" in str(error) else None
        raise ConfigError(str(error), hint) from error


def choose_wiring(config: CheckpointConfig, arch: Arch, name: str, layers: str, **fields: Any) -> Wiring:
    """``asked_wiring``, applied to a model on the meta device as a check.

    Raises:
        ConfigError: as ``asked_wiring``, and where the wiring does not fit the model.
    """
    import torch

    from fcsd.models.build import check_injected, model_classes, require_desync

    wiring = asked_wiring(config, arch, name, layers, **fields)
    try:
        if layers.strip() == "all":
            wiring = _all_that_can(_converted_config(config, arch, wiring), wiring)
        cls = model_classes(arch.model_type)["AutoModelForCausalLM"]
        with torch.device("meta"):
            model = cls(_converted_config(config, arch, wiring))
        require_desync(model.config, wiring)
        check_injected(model.config, wiring)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return wiring


def _all_that_can(config: Any, wiring: Wiring) -> Wiring:
    """``without_injected``, with a word about the layers that stay standard."""
    from fcsd.models.build import injected_layers, without_injected

    found = without_injected(config, wiring)
    if found.layers != wiring.layers:
        log.warning(
            "layers 0-%d stay standard: the model adds image features to the outputs of its first %d layers",
            min(found.layers, default=len(wiring.layers)) - 1,
            injected_layers(config),
        )
    return found


def _as_trained(
    config: CheckpointConfig, name: str, layers: str, fields: dict[str, Any]
) -> tuple[str, str, dict[str, Any]]:
    """The wiring that AMD trained a model with, as options. AMD's transformers file has a partial border."""
    defaults = {"variant": "full", "border": None, "tp_degree": 1, "reduce": None, "distance": 1}
    if (name, layers.strip()) != ("farskip", "all") or any(fields[key] != defaults[key] for key in fields):
        raise ConfigError(
            "the model was trained with a wiring of its own, which cannot be changed",
            "Leave out --wiring, --layers and the other options of a wiring: fcsd reads AMD's keys.",
        )
    own, depth = config.rewired or {}, config.text["num_hidden_layers"]
    found = list(range(own["start"], min(own["end"] + 1, depth)))
    border = None if own["variant"] == "mlp-only" else "partial"
    return "farskip", layers_text(found), {"variant": own["variant"], "border": border}


def _converted_config(config: CheckpointConfig, arch: Arch, wiring: Wiring) -> Any:
    from fcsd.models.build import config_class

    left_out = ("model_type", "quantization_config", *AMD_KEYS)
    raw = {key: value for key, value in config.raw.items() if key not in left_out}
    return config_class(arch.model_type).from_dict({**with_floats(raw), "fcsd": wiring.to_block()})
