"""Registers the converted architectures with vLLM: model classes, checks, config parser, model runner, tokenizers.

The config parser comes last. If anything before it fails, vLLM cannot read the config of a converted model, and refuses
it.
"""

from typing import Any

import vllm.config.vllm as settings  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]
from vllm.transformers_utils import config as parsing  # pyright: ignore[reportMissingImports]

from fcsd.models.archs import ARCHS
from fcsd.models.build import register_configs
from fcsd.serve.vllm.checks import check
from fcsd.serve.vllm.config import parser_for

_MODELS = "fcsd.serve.vllm.models"


def register() -> None:
    """Register everything. A second call changes nothing."""
    if MODELS_CONFIG_MAP.keys() >= {arch.wired_causal_lm for arch in ARCHS.values()}:
        return
    # vLLM's own function for this warns that the format is taken.
    formats = parsing._CONFIG_FORMAT_TO_CONFIG_PARSER
    parser = parser_for(formats["hf"])
    for model_type, arch in ARCHS.items():
        name = arch.wired_causal_lm
        ModelRegistry.register_model(name, f"{_MODELS}:{name}")
        MODELS_CONFIG_MAP[name] = _hooks(model_type, MODELS_CONFIG_MAP.get(arch.causal_lm))
    # vLLM has two model runners. A converted model gets that of its base, or the two could not be compared.
    defaults = settings.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES
    same = {arch.wired_causal_lm for arch in ARCHS.values() if arch.causal_lm in defaults}
    settings.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = defaults | same
    if hasattr(settings, "default_v2_model_runner_architectures"):
        settings.default_v2_model_runner_architectures.cache_clear()
    register_configs()
    formats["hf"] = parser


def _hooks(model_type: str, base: Any) -> type:
    """What vLLM calls with its settings: the checks, and what it calls for the base."""

    class Hooks:
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            check(vllm_config, model_type)
            if base is not None:
                base.verify_and_update_config(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if base is not None:
                base.verify_and_update_model_config(model_config)

    return Hooks
