"""Reads config.json and checks what it says before any class is built from it; the file is not trusted."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fcsd.checkpoint.files import contained, quoted, read_object
from fcsd.checkpoint.limits import check_numbers
from fcsd.checkpoint.rewired import GATED_ATTENTION, PREFIX, has_gated_attention, read_rewiring
from fcsd.errors import BadInputError

_NAME = re.compile(r"[\w.-]{1,100}")
_HUB_CODE_KEYS = ("attn_implementation", "experts_implementation")
_AUTO_MAP_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"),
)


@dataclass(frozen=True)
class CheckpointConfig:
    """What config.json says.

    Attributes:
        raw: all of it.
        model_type: the base architecture's, for a converted checkpoint too.
        text: the decoder's part of ``raw``; ``raw`` itself unless the model is multimodal.
        quantization: None, ``"mxfp4"``, or ``"fp8"`` (in blocks).
        rewired: how the model is rewired already, see :func:`fcsd.checkpoint.rewired.read_rewiring`; None if it is not.
    """

    raw: dict[str, Any]
    model_type: str
    text: dict[str, Any]
    quantization: str | None
    rewired: dict[str, Any] | None

    @property
    def foreign(self) -> bool:
        """Whether the model's own code computes something else than transformers' class of its type (AMD's)."""
        return self.rewired is not None and self.rewired["by"] != "fcsd"


def read_config(path: Path, *, trust_remote_code: bool = False) -> CheckpointConfig:
    """Read and check ``config.json`` of a checkpoint directory. Runs nothing, builds nothing.

    A rewired checkpoint is read and its ``auto_map`` accepted. Callers that need an original refuse it themselves.

    Args:
        path: the directory.
        trust_remote_code: accept a checkpoint with code of its own (fcsd uses transformers' classes all the same).

    Raises:
        BadInputError: malformed, contradictory, of an unsupported type, or it asks for code to be run.
    """
    where = path / "config.json"
    raw = read_object(contained(path, "config.json"))
    _check_values(raw, where)
    declared = raw.get("model_type")
    if not isinstance(declared, str) or not _NAME.fullmatch(declared):
        raise BadInputError(f"{where}: has no model_type")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(_NAME.fullmatch(str(name)) for name in architectures):
        raise BadInputError(f"{where}: architectures is not a list of class names")
    rewired = read_rewiring(raw, declared, where)
    config = CheckpointConfig(
        raw,
        model_type=declared.removeprefix(PREFIX),
        text=raw.get("text_config", raw) if declared.endswith("llama4") else raw,
        quantization=_quantization(raw, where),
        rewired=rewired,
    )
    if rewired is None and not trust_remote_code:
        _refuse_remote_code(path)
    if not config.foreign:
        _check_type(config, where)
    for part in (raw, config.text, raw.get("vision_config", {})):
        if not isinstance(part, dict):
            raise BadInputError(f"{where}: text_config and vision_config must be objects")
        check_numbers(part, where)
    return config


def _check_values(raw: dict[str, Any], where: Path) -> None:
    for key in ("dtype", "torch_dtype"):
        if not isinstance(raw.get(key, ""), str | None):
            raise BadInputError(f"{where}: {key} is not a name")
    for key, value in _walk(raw):
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInputError(f"{where}: {quoted(key)} is not finite")
        if key.endswith(_HUB_CODE_KEYS) and isinstance(value, str) and "/" in value:
            raise BadInputError(
                f"{where}: {quoted(key)} asks for code of its own to be run, {quoted(value)}",
                "Remove the key; fcsd chooses the implementation itself.",
            )
        if key == "transformers_weights":  # transformers would read that file; what is checked here is another
            raise BadInputError(f"{where}: {quoted(key)} names weights of its own", "Remove the key.")


def _check_type(config: CheckpointConfig, where: Path) -> None:
    from fcsd.models.archs import ARCHS

    if has_gated_attention(config.raw):
        raise BadInputError(f"{where}: {GATED_ATTENTION}", "Convert a model whose attention transformers implements.")
    if config.model_type not in ARCHS:
        close = get_close_matches(config.model_type, ARCHS, 1, 0.5)
        raise BadInputError(
            f"{where}: model_type {quoted(config.model_type)} is not supported"
            + (f"; closest: {close[0]}" if close else ""),
            f"Supported: {', '.join(ARCHS)}. CONTRIBUTING.md says how to add one.",
        )
    ours, _ = ARCHS[config.model_type].classes["AutoModelForCausalLM"]
    found = config.raw.get("architectures")
    if config.rewired is None and found not in (None, [ours]):
        raise BadInputError(f"{where}: architectures is {quoted(str(found))}, not [{ours!r}]")


def _quantization(raw: dict[str, Any], where: Path) -> str | None:
    block = raw.get("quantization_config")
    if block is None:
        return None
    block = block if isinstance(block, dict) else {}
    method, sizes = block.get("quant_method"), block.get("weight_block_size")
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8" and isinstance(sizes, list) and [type(n) is int and n > 0 for n in sizes] == [True, True]:
        return "fp8"
    raise BadInputError(
        f"{where}: quantisation {quoted(str(method))} is not supported", "Supported: none, mxfp4, fp8 in blocks."
    )


def _refuse_remote_code(path: Path) -> None:
    for name in _AUTO_MAP_FILES:
        if (path / name).exists() and "auto_map" in read_object(contained(path, name)):
            raise BadInputError(
                f"{path / name}: auto_map asks for code of its own to be run",
                "With --trust-remote-code fcsd takes the checkpoint, and uses transformers' own classes.",
            )


def _walk(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every (key, value) at any depth; below a key that can name code, everything goes under that key."""
    stack = list(root.items())
    while stack:
        key, value = stack.pop()
        yield key, value
        if isinstance(value, dict):
            stack += [(key if key.endswith(_HUB_CODE_KEYS) else inner, item) for inner, item in value.items()]
        elif isinstance(value, list):
            stack += [(key, item) for item in value]
