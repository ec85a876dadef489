"""DeepSpeed AutoEP: configuration, the shim that transformers 5.23 needs, and sharding without an engine.

Everything version-dependent about AutoEP is in this file.
"""

from typing import Any

from transformers import PreTrainedModel

from fcsd.errors import ConfigError
from fcsd.models.archs import Arch


def expert_parallel_config(arch: Arch, ep_size: int) -> dict[str, Any]:
    """The ``expert_parallel`` section of a DeepSpeed config.

    AutoEP finds MoE blocks by ``model_type``, which a converted model changes on purpose, so the row's keys are given.

    Raises:
        ConfigError: the architecture has no experts, or AutoEP cannot hold its experts.
    """
    if arch.autoep is None:
        raise ConfigError(f"{arch.model_type} cannot be expert-parallel: {arch.no_ep or 'it has no experts'}")
    return {"enabled": True, "autoep_size": ep_size, "use_grouped_mm": False, **arch.autoep}


def allow_string_keys() -> None:
    """Let AutoEP 0.19.8 look up transformers' output recorders by class name.

    Since transformers 5.23 the registry turns each key into the name of the key's class, so that a name given
    directly is not found; earlier versions hold a plain dict and need nothing.
    """
    from transformers.utils import output_capturing

    registry_type = type(output_capturing._CAN_RECORD_REGISTRY)
    if registry_type is dict:
        return

    def get(self: dict, key: Any, default: Any = None) -> Any:
        found = dict.get(self, key if isinstance(key, str) else str(key.__class__), default)
        return {} if found is None else found  # a class may be entered with None

    def put(self: dict, key: Any, value: Any) -> None:
        dict.__setitem__(self, key if isinstance(key, str) else str(key.__class__), value)

    registry_type.get, registry_type.__setitem__ = get, put  # pyright: ignore[reportAttributeAccessIssue]


def shard_experts(model: PreTrainedModel, arch: Arch, ep_size: int) -> None:
    """Replace every MoE block by an AutoEP layer that keeps this rank's experts, without an engine.

    A model on the meta device stays there. ``deepspeed.initialize`` takes what it gets if its config has no
    ``expert_parallel`` section. The default process group must exist.

    Raises:
        ConfigError: see ``expert_parallel_config``; or AutoEP found no MoE block.
    """
    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.utils import groups

    allow_string_keys()
    config = expert_parallel_config(arch, ep_size)
    accelerator: Any = get_accelerator()
    config["use_grouped_mm"] = accelerator.device_name() == "cuda"
    config["top_k"] = model.config.get_text_config().num_experts_per_tok  # AutoEP knows no config within a config
    sharder = AutoEP(model, parse_autoep_config(config))
    specs = sharder.ep_parser()
    if not specs:
        raise ConfigError(f"DeepSpeed AutoEP found no MoE block in {type(model).__name__}")
    if f"ep_size_{ep_size}" not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    with next(model.parameters()).device:  # AutoEP makes its layers on the default device
        sharder.replace_moe_layers(specs, ep_size=ep_size, ep_rank=dist.get_rank() % ep_size)
    for module in model.modules():
        if isinstance(module, AutoEPMoELayer):
            module.set_deepspeed_parallelism(False)
