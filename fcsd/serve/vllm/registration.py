"""Registers the converted architectures with vLLM: model classes, checks, config parser, model runner, tokenizers.

Every other architecture of vLLM gets a check as well: it refuses a converted model, which ``--hf-overrides`` or
``--model-impl`` could otherwise have built as its original.

The config parser comes last. If anything before it fails, vLLM cannot read the config of a converted model, and refuses
it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import vllm.config.vllm as settings  # pyright: ignore[reportMissingImports]
from vllm import __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]
from vllm.transformers_utils import config as parsing  # pyright: ignore[reportMissingImports]

from fcsd.models.archs import ARCHS
from fcsd.models.build import register_configs
from fcsd.serve.vllm.checks import check, refuse_other_architecture
from fcsd.serve.vllm.config import parser_for
from fcsd.serve.vllm.support import version_of

_MODELS = "fcsd.serve.vllm.models"
NO_LIST_OF_RUNNERS = (0, 29)  # the first version of vLLM without a list of architectures for its second model runner


def register() -> None:
    """Register everything. A second call changes nothing."""
    if MODELS_CONFIG_MAP.keys() >= {arch.wired_causal_lm for arch in ARCHS.values()}:
        return
    # vLLM's own function for this warns that the format is taken.
    formats = parsing._CONFIG_FORMAT_TO_CONFIG_PARSER
    parser = parser_for(formats["hf"])
    others = {name for arch in ARCHS.values() for name in (arch.causal_lm, arch.vllm_causal_lm)}
    others |= MODELS_CONFIG_MAP.keys()
    others |= set(getattr(ModelRegistry, "get_supported_archs", set)())
    hooks: dict[str, type] = {}
    for name in others:
        hooks[name] = _hooks(partial(refuse_other_architecture, name=name), MODELS_CONFIG_MAP.get(name))
    for model_type, arch in ARCHS.items():
        own = partial(check, model_type=model_type)
        hooks[arch.wired_causal_lm] = _hooks(own, MODELS_CONFIG_MAP.get(arch.vllm_causal_lm))
        ModelRegistry.register_model(arch.wired_causal_lm, f"{_MODELS}:{arch.wired_causal_lm}")
    MODELS_CONFIG_MAP.update(hooks)
    _share_model_runner()
    register_configs()
    formats["hf"] = parser


def _share_model_runner() -> None:
    """Give a converted model the model runner of its base, or the two could not be compared.

    Up to 0.28 vLLM has a list of the architectures that its second runner serves by default. Later versions decide by
    the features that are asked for, never by the architecture.

    Raises:
        AttributeError: this version should have the list, and has not.
    """
    if version_of(__version__) >= NO_LIST_OF_RUNNERS:
        return
    defaults = settings.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES
    same = {arch.wired_causal_lm for arch in ARCHS.values() if arch.vllm_causal_lm in defaults}
    settings.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = defaults | same
    if hasattr(settings, "default_v2_model_runner_architectures"):
        settings.default_v2_model_runner_architectures.cache_clear()


def _hooks(checked: Callable[[Any], None], base: Any) -> type:
    """What vLLM calls with its settings: ``checked``, and what it calls for the base, if there is one."""

    derived: Any = base if isinstance(base, type) else object  # keeps whatever else vLLM's class has

    class Hooks(derived):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            checked(vllm_config)
            if base is not None:
                base.verify_and_update_config(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if base is not None:
                base.verify_and_update_model_config(model_config)

    return Hooks
