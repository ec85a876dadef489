"""Expert parallelism of a run: what it asks of the recipe, and what it does to the student and the teacher.

Every process is data parallel, and ``train.expert_parallel`` neighbouring ones divide the experts of each MoE layer
among them. The experts are sharded before DeepSpeed sees the model. Its engine finds AutoEP's layers and sums an
expert's gradient over the processes that hold the same expert only, since the tokens of the others came to it; both
kinds of gradient are divided by all processes, which ``train_step`` makes up for.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import resolve
from fcsd.config import Recipe, Train
from fcsd.distill.teacher.original import needs_teacher, teacher_name
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.models.build import arch_of, experts_of, load_model, register, wiring_of


def check(recipe: Recipe, processes: int) -> None:
    """Holds ``train.expert_parallel`` against the processes and, by their configs alone, the models.

    Raises:
        ConfigError: it does not divide the processes or the experts, or a model cannot be expert-parallel.
    """
    degree = recipe.train.expert_parallel
    if degree == 1:
        return
    if processes % degree:
        raise ConfigError(
            f"train.expert_parallel {degree} does not divide the {processes} processes",
            hint=f"start a multiple of {degree}, with --gpus, or lower it",
        )
    register()
    _check_model(recipe.model, degree, hint="set train.expert_parallel: 1")
    if needs_teacher(recipe) and teacher_degree(recipe.train) > 1:
        _check_model(teacher_name(recipe), degree, hint="set train.teacher_placement: replicated")


def _check_model(name: str, degree: int, hint: str) -> None:
    from fcsd.parallel.expert.autoep import expert_parallel_config

    config = AutoConfig.from_pretrained(resolve(name, weights=False).path, trust_remote_code=False)
    try:
        expert_parallel_config(arch_of(config), degree)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", hint) from error
    if experts_of(config) % degree:
        raise ConfigError(f"train.expert_parallel {degree} does not divide the {experts_of(config)} experts of {name}")


def load(
    path: Path, degree: int, *, dtype: torch.dtype, device: torch.device, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """A model in eval mode: with all its experts, or with this process's share where ``degree`` divide them.

    Args:
        config: replaces the directory's own.
    """
    if degree == 1:
        return load_model(path, dtype=dtype, device=device, config=config)
    from fcsd.parallel.weights.loading import load_expert_parallel

    return load_expert_parallel(path, dtype=dtype, device=device, ep_size=degree, config=config)


def randomise(
    config: PretrainedConfig, degree: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """As ``load``, with random weights: the same ones whatever ``degree``."""
    from fcsd.parallel.weights.random_init import random_expert_parallel, random_model

    if degree == 1:
        return random_model(config, dtype=dtype, device=device, seed=seed)
    return random_expert_parallel(config, dtype=dtype, device=device, ep_size=degree, seed=seed)


def teacher_degree(train: Train) -> int:
    """Among how many processes the teacher's experts are divided."""
    return 1 if train.teacher_placement == "replicated" else train.expert_parallel


def wire_sharded(model: PreTrainedModel, degree: int, train: Train) -> None:
    """Lets a model whose experts ``degree`` divide compute its own wiring, overlapped and fused as the recipe says."""
    if degree > 1:
        from fcsd.parallel.overlap import overlap
        from fcsd.parallel.transports.copies import CopiesTransport
        from fcsd.parallel.transports.symmetric_memory import open_buffers
        from fcsd.parallel.transports.transport import all_to_all

        on_cuda = model.device.type == "cuda"
        transport = CopiesTransport(open_buffers) if on_cuda and train.transport == "auto" else all_to_all
        overlap(model, wiring_of(model.config), train.overlap, fused=train.fused and on_cuda, transport=transport)


def clip_without_zero(engine: Any, train: Train, world: World) -> Tensor:
    """The global gradient norm, and gradients clipped to ``train.grad_clip``, for ZeRO stage 0.

    DeepSpeed clips in its ZeRO optimizers by the norm of all experts, but at stage 0 by that of the process's own.
    """
    parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
    gradients: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        gradients[_is_expert(parameter)].append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(gradients[False])
    if train.expert_parallel > 1:
        squared = torch.nn.utils.get_total_norm(gradients[True]).square()
        dist.all_reduce(squared)  # as many processes hold an expert as there are groups
        norm = (norm.square() + squared * train.expert_parallel / world.size).sqrt()
    if train.grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, train.grad_clip, norm)
    return norm


def _is_expert(parameter: Tensor) -> bool:
    from deepspeed.moe.utils import is_moe_param

    return is_moe_param(parameter)
