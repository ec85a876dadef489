"""Expert parallelism of a run: the checks of the recipe, and how the student and the teacher are sharded.

Every process is data parallel, and each group of ``parallel.ep_size`` neighbouring processes divides the experts of
each MoE layer among its members. The experts are sharded before DeepSpeed sees the model. Its engine finds AutoEP's
layers and sums an expert's gradient over only those processes that hold the same expert: the tokens of the other
processes reached the expert through the all-to-all. Both kinds of gradient are divided by the number of all processes,
and ``launch_step`` multiplies the loss by that number in advance.
"""

import logging
import os
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import resolve
from fcsd.config import Parallel, Recipe
from fcsd.distill.teacher.original import needs_teacher, teacher_name
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, experts_of, load_model, register, wiring_of

log = logging.getLogger(__name__)


def check(recipe: Recipe, processes: int) -> None:
    """Checks ``parallel.ep_size`` against the number of processes and the configs of the models.

    Rank 0 logs a warning if ``parallel.dedup`` has no effect, because each token chooses one expert.

    Raises:
        ConfigError: ``ep_size`` does not divide the number of processes or of experts, or a model does not support
            expert parallelism.
    """
    ep_size = recipe.parallel.ep_size
    if ep_size == 1:
        return
    if processes % ep_size:
        raise ConfigError(
            f"parallel.ep_size {ep_size} does not divide the {processes} processes",
            hint=f"start a multiple of {ep_size}, with --gpus, or lower parallel.ep_size",
        )
    register()
    config = _check_model(recipe.model, ep_size, hint="set parallel.ep_size: 1")
    if needs_teacher(recipe) and recipe.parallel.teacher_ep_size > 1:
        _check_model(teacher_name(recipe), ep_size, hint="set parallel.teacher_placement: replicated")
    dedup = recipe.parallel.dedup
    if dedup != "off" and config.get_text_config().num_experts_per_tok == 1 and os.environ.get("RANK", "0") == "0":
        log.warning("%s: parallel.dedup %s has no effect, because each token chooses one expert", recipe.model, dedup)


def _check_model(name: str, ep_size: int, hint: str) -> PretrainedConfig:
    from fcsd.parallel.expert.autoep import expert_parallel_config

    config = AutoConfig.from_pretrained(resolve(name, weights=False).path, trust_remote_code=False)
    try:
        expert_parallel_config(arch_of(config), ep_size)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", hint) from error
    if experts_of(config) % ep_size:
        raise ConfigError(f"parallel.ep_size {ep_size} does not divide the {experts_of(config)} experts of {name}")
    return config


def load(
    path: Path, ep_size: int, *, dtype: torch.dtype, device: torch.device, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Loads a model in eval mode with this process's share of the experts.

    Args:
        path: the checkpoint directory.
        ep_size: the number of processes that divide the experts; with 1 every process has all of them.
        config: is used in place of the config in the directory.
    """
    if ep_size == 1:
        return load_model(path, dtype=dtype, device=device, config=config)
    from fcsd.parallel.weights.loading import load_expert_parallel

    return load_expert_parallel(path, dtype=dtype, device=device, ep_size=ep_size, config=config)


def randomise(
    config: PretrainedConfig, ep_size: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Like ``load``, but with random weights, which are the same at any ``ep_size``."""
    from fcsd.parallel.weights.random_init import random_expert_parallel, random_model

    if ep_size == 1:
        return random_model(config, dtype=dtype, device=device, seed=seed)
    return random_expert_parallel(config, dtype=dtype, device=device, ep_size=ep_size, seed=seed)


def wire_sharded(model: PreTrainedModel, ep_size: int, parallel: Parallel) -> None:
    """Installs the overlapped schedule of the model's own wiring, with the settings of ``parallel``.

    Args:
        ep_size: the number of processes that divide the model's experts; with 1 the model is left as it is.
    """
    if ep_size > 1:
        from fcsd.parallel.expert.hierarchical import dispatcher_of
        from fcsd.parallel.overlap import overlap
        from fcsd.parallel.transports.copies import CopiesTransport
        from fcsd.parallel.transports.symmetric_memory import open_buffers
        from fcsd.parallel.transports.transport import all_to_all

        on_cuda = model.device.type == "cuda"
        overlap(
            model,
            wiring_of(model.config),
            parallel.overlap,
            fused=parallel.fused and on_cuda,
            transport=CopiesTransport(open_buffers) if on_cuda and parallel.transport == "auto" else all_to_all,
            dispatcher=dispatcher_of(parallel.dedup, ep_size, parallel.node_size),
        )
