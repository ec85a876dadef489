"""The model classes that vLLM loads: its own class of each architecture, rewired after it is built.

vLLM finds a class by the name under which it was registered (``Arch.wired_causal_lm``). A class is made when it is
asked for.
"""

import logging
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_world_size,
    get_tp_group,
)
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.utils import PPMissingLayer  # pyright: ignore[reportMissingImports]

from fcsd.models.arch import VllmNames
from fcsd.models.archs import ARCHS
from fcsd.models.build import injected_layers
from fcsd.models.schedule import Kind, layer_plans
from fcsd.models.wiring_block import Blocks, Wiring
from fcsd.serve.vllm.gates import add_gates, load_gates
from fcsd.serve.vllm.layer import Wired, check_handed_on, kind_of, read_ahead, take_apart
from fcsd.serve.vllm.reduction import Reducer, Settings, define_operators, leaves_out, read_settings

log = logging.getLogger("vllm.fcsd")


def rewire(model: Any, names: VllmNames, vllm_config: Any) -> None:
    """Rewire one of vLLM's models in place. Under pipeline parallelism this is about the layers of the own stage.

    Args:
        model: vLLM's model.
        names: what vLLM calls the parts of its layers.
        vllm_config: vLLM's ``VllmConfig``, whose ``hf_config`` has the ``fcsd`` block.

    Raises:
        ValueError: the wiring does not fit the model or the pipeline stages.
    """
    wiring = Wiring.from_block(vllm_config.model_config.hf_config.fcsd)
    parallel = vllm_config.parallel_config
    settings = read_settings(vllm_config.additional_config, parallel.tensor_parallel_size)
    reducer = _reducer(settings)
    layers = model.get_submodule(names.decoder).layers
    own = [i for i, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    stage = range(own[0], own[-1] + 1)
    kinds: list[Kind] = [kind_of(layer, names) if i in stage else "moe-shared" for i, layer in enumerate(layers)]
    blocks = Blocks(attn_norms=names.attn_norms, mlp_norms=names.mlp_norms)
    plans = layer_plans(wiring, kinds, stage, blocks=blocks)
    config = vllm_config.model_config.hf_config
    check_handed_on(plans, injected_layers(config))
    multiplier = None if names.multiplier is None else getattr(config, names.multiplier)
    if multiplier is not None and names.multiplier_by_depth:
        multiplier /= math.sqrt(config.num_hidden_layers)
    # The sum of shared experts that vLLM calls is added as it arrives.
    plain = multiplier is None and names.mlp_norms[1] is None and not names.shared_beside
    ahead = read_ahead(plans) if names.inputs is not None or names.scale is not None else {}
    for i, plan in plans.items():
        beside = settings.shared_experts == "beside" and plain
        own = Wired(names, plan, reducer, beside, multiplier=multiplier, ahead=ahead.get(i, ()))
        take_apart(layers[i], own)


def _reducer(settings: Settings) -> Reducer:
    if leaves_out(settings.reduce):
        log.warning(
            "WRONG RESULTS: reduce=%s leaves every sum out. Use it to measure a bound, and nothing else.",
            settings.reduce,
        )
    define_operators()
    ranks, group = get_tensor_model_parallel_world_size(), get_tp_group().unique_name
    return Reducer(ranks, group, settings.reduce, settings.overlap_from, settings.pieces)


@cache
def _class(model_type: str) -> type:
    arch = ARCHS[model_type]
    name = arch.vllm_causal_lm
    base = ModelRegistry._try_load_model_cls(name)
    if base is None:
        raise ImportError(f"this vLLM cannot load {name}")
    if "transformers" in base.__module__.split("."):
        raise ImportError(f"this vLLM runs {name} by transformers, whose layers the plugin cannot rewire")

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        if arch.blocks.gated is not None and getattr(vllm_config.model_config.hf_config, arch.blocks.gated, False):
            add_gates(self, arch.vllm)
        rewire(self, arch.vllm, vllm_config)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        gates: set[str] = set()
        loaded = base.load_weights(self, load_gates(self, weights, gates))
        return loaded if loaded is None else loaded | gates

    methods = {"__init__": __init__} | ({} if arch.blocks.gated is None else {"load_weights": load_weights})
    return type(arch.wired_causal_lm, (base,), {**methods, "__module__": __name__})


def __getattr__(name: str) -> type:
    for model_type, arch in ARCHS.items():
        if name == arch.wired_causal_lm:
            return _class(model_type)
    raise AttributeError(name)
