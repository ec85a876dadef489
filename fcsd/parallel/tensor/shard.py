"""Makes a model with sharded weights trainable: which gradients are whole, and which a rank has a part of.

A sharded weight has a gradient of its own on each rank. A weight that every rank has is trained alike everywhere, so
its gradient must have the same bits on all ranks. Outside of attention and MLP it has: norms, embeddings and the output
head read and give whole tensors, and all sums over ranks give the same bits on each of them. Inside, a rank computes
with its own heads or columns alone, so gradients of weights such as the norm of each head are summed over the ranks. So
are those of norms that read a stream of the rank alone.
The bias of a row-parallel product is added once, by the first rank, which alone trains it.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.config import Init, Parallel
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, decoder_layers, experts_of
from fcsd.models.wiring import mixer, mlp_of
from fcsd.models.wiring_block import DESYNC, Wiring
from fcsd.parallel.tensor.tp_plan import Shard, Sharding, TensorGroup, model_shardings, put_part

# DeepSpeed reads this attribute of a parameter, too: with it, the parameter is another one on each rank.
SHARDED = "tensor_model_parallel"
_PARTIAL = "partial_gradient"


def check_trainable(name: str, config: PretrainedConfig, degree: int) -> None:
    """Refuse a model that ``degree`` ranks cannot train together. Only the config is read.

    Raises:
        ConfigError: the type of the model cannot be sharded, it has experts, or the degree does not divide its heads,
            its key-value heads or its intermediate size.
    """
    arch, text, hint = arch_of(config), config.get_text_config(), "set parallel.tp_size: 1"
    if arch.no_tp is not None:
        raise ConfigError(f"{name}: parallel.tp_size {degree}: {arch.model_type}: {arch.no_tp}", hint)
    if experts_of(config):
        raise ConfigError(f"{name}: parallel.tp_size {degree}: tensor-parallel training does not shard experts", hint)
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(text, what, None)
        if isinstance(size, int) and size % degree:
            raise ConfigError(f"{name}: parallel.tp_size {degree} does not divide {what} {size}", hint)


def check_sharded(
    models: Iterable[tuple[str, PretrainedConfig, Wiring, Init | None]], parallel: Parallel, processes: int
) -> None:
    """Refuse processes and models that ``parallel.tp_size`` does not suit. Only configs are read.

    Args:
        models: the name, the config and its wiring of student and teacher, and the recipe's ``init`` for the student.

    Raises:
        ConfigError: the size does not divide the number of processes, or see ``check_trainable`` and ``check_desync``.
    """
    degree = parallel.tp_size
    if processes % degree:
        raise ConfigError(
            f"parallel.tp_size {degree} does not divide the {processes} processes",
            hint=f"start a multiple of {degree}, with --gpus, or lower parallel.tp_size",
        )
    for name, config, own, init in models:
        check_trainable(name, config, degree)
        wiring, made_for = own.name, own.tp_degree
        if init is not None and init.wiring is not None:
            wiring, made_for = init.wiring, init.gpus
        if wiring in DESYNC:
            check_desync(f"{name}: {wiring}", made_for, degree)


def check_desync(name: str, tp_degree: int, degree: int) -> None:
    """Refuse a Desync wiring for another number of ranks: each rank keeps its own residual stream.

    Args:
        tp_degree: the number of ranks that the wiring was made for.

    Raises:
        ConfigError: ``degree`` is another number.
    """
    if tp_degree != degree:
        raise ConfigError(
            f"{degree} tensor-parallel ranks cannot train {name} of tp_degree {tp_degree}",
            f"set parallel.tp_size to {tp_degree}, or to 1: one process then trains all ranks of the wiring",
        )


def prepare(model: PreTrainedModel, ranks: TensorGroup, group: Any = None) -> dict[str, Sharding]:
    """Let the parameters of a sharded model be trained, in place. The call can be repeated.

    Args:
        model: a dense model whose decoder layers are sharded by the TP plan, with whole embeddings and a whole head.
        group: the ranks of ``ranks`` in another process group, for the sums of the gradients of small weights. On GPUs
            such a sum then does not wait for the larger ones in flight. None takes the group of ``ranks``.

    Returns: what this rank has of every parameter and persistent buffer, by name.
    """
    arch = arch_of(model.config)
    shardings = model_shardings(model, arch, "whole")
    layers = {parameter for layer in decoder_layers(model) for parameter in layer.parameters()}
    parts = [part(arch.blocks, layer) for layer in decoder_layers(model) for part in (mixer, mlp_of)]
    model.requires_grad_(True)
    for name, parameter in model.named_parameters():
        sharding, prepared = shardings[name], hasattr(parameter, SHARDED)
        setattr(parameter, SHARDED, sharding != "whole")
        if sharding == "first":
            parameter.requires_grad_(ranks.rank == 0)
        if sharding == "whole" and parameter in layers and ranks.degree > 1 and not prepared:
            parameter.register_hook(partial(_summed, parameter, ranks.group if group is None else group))
    for part in parts:
        mark_partial(part, True)
    return shardings


def mark_partial(module: torch.nn.Module, is_partial: bool) -> None:
    """Say whether a rank computes only a part of the gradients of those parameters that every rank has as a whole."""
    for parameter in module.parameters():
        setattr(parameter, _PARTIAL, is_partial)


def whole_shape(part: Tensor, sharding: Sharding, degree: int) -> list[int]:
    """The shape of the tensor of which ``part`` is one rank's part."""
    shape = list(part.shape)
    if isinstance(sharding, Shard):
        shape[sharding.dim] *= degree
    return shape


def gather(part: Tensor, sharding: Sharding, ranks: TensorGroup, kv_heads: int) -> Tensor:
    """The whole tensor of which every rank of ``ranks`` has a part. All of them call this.

    Args:
        kv_heads: the key-value heads of the whole model, of which every rank has some.
    """
    if sharding == "whole" or ranks.degree == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.degree)]
    dist.all_gather(parts, part.contiguous(), group=ranks.group)
    whole = part.new_empty(whole_shape(part, sharding, ranks.degree))
    for rank, each in enumerate(parts):
        put_part(whole, each, sharding, TensorGroup(None, ranks.degree, rank), kv_heads)
    return whole


def _summed(parameter: Tensor, group: Any, grad: Tensor) -> Tensor | None:
    if not getattr(parameter, _PARTIAL, False):
        return None
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total
