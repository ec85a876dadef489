"""Expert parallelism of a run: how student and teacher are loaded and wired.

Where tensor-parallel ranks shard the models instead, ``load``, ``randomise`` and ``wire_sharded`` take these ranks.

Every process is data parallel, and each group of ``parallel.ep_size`` neighbouring processes divides the experts of
each MoE layer among its members. The experts are sharded before DeepSpeed sees the model. Its engine finds AutoEP's
layers and sums an expert's gradient over only those processes that hold the same expert: the tokens of the other
processes reached the expert through the all-to-all. Both kinds of gradient are divided by the number of all processes,
and ``launch_step`` multiplies the loss by that number in advance.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.config import Parallel, Recipe
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, load_model, wiring_of
from fcsd.models.fused import fuse_parts
from fcsd.models.wiring import DESYNC, Wiring
from fcsd.parallel.expert.dispatcher import Dispatcher
from fcsd.parallel.quantised import Quantiser, formats_of
from fcsd.parallel.tensor.layer import wire_training
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.transports.transport import Traffic, Transport, all_to_all


def dispatcher_for(parallel: Parallel, ep_size: int) -> Dispatcher:
    """The function that makes the dispatchers of a model whose experts are divided among ``ep_size`` processes."""
    from fcsd.parallel.expert.hierarchical import dispatcher_of

    return dispatcher_of("off", 1, None) if ep_size == 1 else dispatcher_of(parallel.dedup, ep_size, parallel.node_size)


def quantiser_of(recipe: Recipe) -> Quantiser | None:
    """Rounds the rows of the student as the recipe says; None if all rows are sent as they are."""
    quantised = recipe.parallel.quantised
    return Quantiser(formats_of(quantised)) if quantised.any else None


def load(
    path: Path,
    ep_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    config: PretrainedConfig | None = None,
    dispatched: bool = False,
    orders: Mapping[str, Sequence[int]] | None = None,
    ranks: TensorGroup | None = None,
) -> PreTrainedModel:
    """Loads a model in eval mode with this process's share of it.

    Args:
        ep_size: the number of processes that divide the experts; with 1 every process has all of them.
        config: is used in place of the config in the directory.
        dispatched: whether rows pass through a dispatcher even if no experts are divided, so that they can be rounded.
        orders: where the experts are if they have changed places; see ``load_expert_parallel``.
        ranks: the ranks that shard the decoder layers; None if every rank has them.
    """
    if ranks is not None:
        from fcsd.engine.weights import load_tensor_parallel

        how: Any = {"dtype": dtype, "device": device, "whole_vocabulary": True}
        return load_tensor_parallel(path, ranks=ranks, config=config, **how)
    if ep_size == 1 and not dispatched:
        # What trains, or has adapters beside it, is a plain weight. Modules of a method's library have none.
        return load_model(path, dtype=dtype, device=device, config=config, decode=True)
    from fcsd.parallel.weights.loading import load_expert_parallel

    return load_expert_parallel(path, dtype=dtype, device=device, ep_size=ep_size, config=config, orders=orders)


def randomise(
    config: PretrainedConfig,
    ep_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    dispatched: bool = False,
    ranks: TensorGroup | None = None,
) -> PreTrainedModel:
    """Like ``load``, but with random weights, which do not depend on the number of processes."""
    if ranks is not None:
        from fcsd.engine.weights import random_tensor_parallel

        how: Any = {"dtype": dtype, "device": device, "whole_vocabulary": True}
        return random_tensor_parallel(config, ranks=ranks, seed=seed, **how)
    from fcsd.parallel.weights.random_init import random_expert_parallel, random_model

    if ep_size == 1 and not dispatched:
        return random_model(config, dtype=dtype, device=device, seed=seed)
    return random_expert_parallel(config, dtype=dtype, device=device, ep_size=ep_size, seed=seed)


def wire_sharded(
    model: PreTrainedModel,
    ep_size: int,
    parallel: Parallel,
    quantiser: Quantiser | None = None,
    traffic: Traffic | None = None,
    dispatcher: Dispatcher | None = None,
    wiring: Wiring | None = None,
    ranks: TensorGroup | None = None,
) -> None:
    """Installs the overlapped schedule of the model's wiring, and fused kernels, with the settings of ``parallel``.

    Args:
        ep_size: the number of processes that divide the model's experts. With 1 nothing is in flight; without a
            quantiser only norms, MLPs and routed experts are then fused.
        quantiser: rounds the rows; None sends them as they are.
        traffic: counts the bytes that are sent; None does not count.
        dispatcher: makes the dispatchers; None stands for a new one of ``dispatcher_for``.
        wiring: used in place of the model's own if the model is divided.
        ranks: the ranks that shard the decoder layers; None if every rank has them.

    Raises:
        ConfigError: the wiring cannot be overlapped, its rows cannot be rounded, or the ranks cannot sum, or send their
            rows, as asked.
    """
    on_cuda, wiring = model.device.type == "cuda", wiring or wiring_of(model.config)
    if ranks is not None or (ep_size == 1 and quantiser is None):
        fuse_parts(model, arch_of(model.config), parallel.fused and on_cuda)
        if ranks is not None:
            wire_training(model, wiring, ranks, parallel.overlap, parallel.all_reduce)
        return
    from fcsd.parallel.overlap import overlap

    if ep_size == 1 and (wiring.name in DESYNC or wiring.distance > 1):
        raise ConfigError(
            "parallel.quantised supports neither desync nor a distance above 1", hint="remove parallel.quantised"
        )
    overlap(
        model,
        wiring,
        parallel.overlap if ep_size > 1 else "off",
        fused=parallel.fused and on_cuda,
        transport=_transport(model, ep_size, parallel),
        dispatcher=dispatcher or dispatcher_for(parallel, ep_size),
        quantiser=quantiser,
        traffic=traffic,
    )


def _transport(model: PreTrainedModel, ep_size: int, parallel: Parallel) -> Transport:
    """How rows travel to experts.

    Raises:
        ConfigError: they shall travel through memory of the host, and the ranks cannot share any.
    """
    if ep_size == 1:
        return all_to_all
    from fcsd.parallel.expert.autoep import expert_blocks
    from fcsd.parallel.transports import host
    from fcsd.parallel.transports.copies import CopiesTransport
    from fcsd.parallel.transports.symmetric_memory import open_buffers

    if parallel.transport == "host":
        from fcsd.parallel.all_reduce.host import sums_of

        transport = host.HostTransport(sums_of, host.streams())
        for block in expert_blocks(model).values():
            sums_of(block.group)  # all ranks open it here, or it is refused before the first step
        return transport
    by_copies = model.device.type == "cuda" and parallel.transport == "auto"
    return CopiesTransport(open_buffers) if by_copies else all_to_all
