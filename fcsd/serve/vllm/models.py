"""The model classes that vLLM loads: its own class of each architecture, rewired after it is built.

vLLM finds a class by the name under which it was registered (``Arch.wired_causal_lm``). A class is made when it is
asked for.
"""

import logging
from functools import cache
from typing import Any

from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_world_size,
    get_tp_group,
)
from vllm.model_executor.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.utils import PPMissingLayer  # pyright: ignore[reportMissingImports]

from fcsd.models.arch import VllmNames
from fcsd.models.archs import ARCHS
from fcsd.models.schedule import Kind, layer_plans
from fcsd.models.wiring_block import Wiring
from fcsd.serve.vllm.exchange import Exchange
from fcsd.serve.vllm.exchange import define_operators as define_exchange
from fcsd.serve.vllm.layer import Wired, kind_of, take_apart
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
    exchanges = settings.exchange == "in flight" and parallel.data_parallel_size > 1
    for i, plan in layer_plans(wiring, kinds, stage, every=exchanges).items():
        exchange = None
        if exchanges and kinds[i] != "dense":
            exchange = _exchange(getattr(layers[i], names.mlp), vllm_config, settings.overlap_from)
        take_apart(layers[i], Wired(names, plan, reducer, exchange))


def _exchange(mlp: Any, vllm_config: Any, overlap_from: int) -> Exchange:
    """How a MoE block exchanges tokens in flight. Its experts stop exchanging them, and are found by their name."""
    define_exchange()
    name = f"{mlp.experts.layer_name}.fcsd"
    vllm_config.compilation_config.static_forward_context[name] = mlp
    # vLLM's kernels for experts are made later. They gather and scatter if there are several data-parallel ranks.
    mlp.experts.moe_config.moe_parallel_config.dp_size = 1
    return Exchange(name, overlap_from)


def _reducer(settings: Settings) -> Reducer:
    if leaves_out(settings.reduce):
        log.warning(
            "WRONG RESULTS: reduce=%s leaves every sum out. Use it to measure a bound, and nothing else.",
            settings.reduce,
        )
    define_operators()
    ranks, group = get_tensor_model_parallel_world_size(), get_tp_group().unique_name
    return Reducer(ranks, group, settings.reduce, settings.overlap_from)


@cache
def _class(model_type: str) -> type:
    arch = ARCHS[model_type]
    base = ModelRegistry._try_load_model_cls(arch.causal_lm)
    if base is None:
        raise ImportError(f"this vLLM cannot load {arch.causal_lm}")
    if "transformers" in base.__module__.split("."):
        raise ImportError(f"this vLLM runs {arch.causal_lm} by transformers, whose layers the plugin cannot rewire")

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        rewire(self, arch.vllm, vllm_config)

    return type(arch.wired_causal_lm, (base,), {"__init__": __init__, "__module__": __name__})


def __getattr__(name: str) -> type:
    for model_type, arch in ARCHS.items():
        if name == arch.wired_causal_lm:
            return _class(model_type)
    raise AttributeError(name)
