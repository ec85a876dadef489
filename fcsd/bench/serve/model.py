"""The model that ``fcsd bench serve`` times: its config, its wirings, its bytes, and prompts for it."""

import torch
from transformers import AutoConfig, PretrainedConfig

from fcsd.bench.serve.workload import OWN, STANDARD, Workload
from fcsd.bench.shapes import SHAPES
from fcsd.checkpoint import open_checkpoint
from fcsd.errors import ConfigError
from fcsd.models.build import (
    arch_of,
    causal_lm_class,
    experts_of,
    key_value_heads,
    register_configs,
    require_desync,
    wiring_of,
)
from fcsd.models.config_keys import WEIGHTS_FILE
from fcsd.models.wiring_block import DESYNC, Wiring


def prompts_of(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` random token ids, the same for every variant."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count, tokens), generator=generator).tolist()


def config_of(model: str, layers: int | None) -> PretrainedConfig:
    """The config of a shape, or of a directory; see ``Workload``.

    Raises:
        ConfigError: the directory was rewired by another program.
        BadInputError: its config.json cannot be read.
    """
    if model in SHAPES:
        return SHAPES[model](SHAPES[model].depth if layers is None else layers)
    if open_checkpoint(model, weights=False).config.foreign:
        raise ConfigError(f"{model}: it was rewired by another program, whose wiring vLLM does not have")
    register_configs()
    return AutoConfig.from_pretrained(model, trust_remote_code=False)


def usual_wirings(load: Workload, config: PretrainedConfig) -> tuple[str, ...]:
    """The names of the wirings that are timed."""
    if load.wirings:
        return load.wirings
    if wiring_of(config).layers:
        return (OWN,)
    return ("farskip",) if experts_of(config) else ("ladder",)


def wiring_for(name: str, config: PretrainedConfig, degree: int) -> Wiring:
    """The wiring of this name over all layers of a model, or the model's own.

    Raises:
        ConfigError: the model cannot have this wiring at this tensor-parallel degree, or ``own`` is asked of an
            original.
    """
    if name == OWN:
        if not wiring_of(config).layers:
            raise ConfigError("own is the wiring of a converted model, and this is an original", "name a wiring")
        return wiring_of(config)
    layers = () if name == STANDARD else tuple(range(config.get_text_config().num_hidden_layers))
    wiring = Wiring(name, layers, tp_degree=degree if name in DESYNC else 1)
    require_desync(config, wiring)
    return wiring


def weight_bytes(config: PretrainedConfig, replicas: int = 1, divided: bool = False) -> int:
    """Bytes of the weights in bfloat16, by the model on the meta device.

    Args:
        replicas: data-parallel replicas, whose weights are counted together.
        divided: whether the replicas divide the routed experts between them.
    """
    fields = {key: value for key, value in config.to_dict().items() if key not in ("fcsd", "model_type", WEIGHTS_FILE)}
    plain = AutoConfig.for_model(arch_of(config).model_type, **fields)
    with torch.device("meta"):
        model = causal_lm_class(plain)(plain)
    once = {name for name, _ in model.named_parameters() if divided and ".experts." in name}
    return 2 * sum(p.numel() * (1 if name in once else replicas) for name, p in model.named_parameters())


def cache_bytes(config: PretrainedConfig, tokens: int, tp: int) -> int:
    """Bytes of the keys and values of ``tokens`` tokens in bfloat16, on all ranks of a tensor-parallel group together.

    This is for plain attention, and more than latent attention needs.
    """
    return tokens * 2 * 2 * sum(max(tp, heads) * width for heads, width in key_value_heads(config))
