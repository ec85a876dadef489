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
from fcsd.serve.vllm.layer import Wired, kind_of, take_apart
from fcsd.serve.vllm.reduction import Reducer, define_operators, leaves_out, read_settings

log = logging.getLogger("vllm.fcsd")


def rewire(model: Any, names: VllmNames, wiring: Wiring, reducer: Reducer) -> None:
    """Rewire one of vLLM's models in place. Under pipeline parallelism this is about the layers of the own stage.

    Raises:
        ValueError: the wiring does not fit the model or the pipeline stages.
    """
    layers = model.get_submodule(names.decoder).layers
    own = [i for i, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    stage = range(own[0], own[-1] + 1)
    kinds: list[Kind] = [kind_of(layer, names) if i in stage else "moe-shared" for i, layer in enumerate(layers)]
    for i, plan in layer_plans(wiring, kinds, stage).items():
        take_apart(layers[i], Wired(names, plan, reducer))


def _reducer(vllm_config: Any) -> Reducer:
    size = get_tensor_model_parallel_world_size()
    reduce, overlap_from = read_settings(vllm_config.additional_config, size)
    if leaves_out(reduce):
        log.warning(
            "WRONG RESULTS: reduce=%s leaves every sum out. Use it to measure a bound, and nothing else.", reduce
        )
    define_operators()
    return Reducer(size, get_tp_group().unique_name, reduce, overlap_from)


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
        rewire(self, arch.vllm, Wiring.from_block(vllm_config.model_config.hf_config.fcsd), _reducer(vllm_config))

    return type(arch.wired_causal_lm, (base,), {"__init__": __init__, "__module__": __name__})


def __getattr__(name: str) -> type:
    for model_type, arch in ARCHS.items():
        if name == arch.wired_causal_lm:
            return _class(model_type)
    raise AttributeError(name)
