"""Expert parallelism of a run: what it asks of the recipe, and what it does to the student and the teacher.

Every process is data parallel, and ``train.expert_parallel`` neighbouring ones divide the experts of each MoE layer
among them. The experts are sharded before DeepSpeed sees the model. Its engine finds AutoEP's layers and sums an
expert's gradient over the processes that hold the same expert only, since the tokens of the others came to it; both
kinds of gradient are divided by all processes, which ``train_step`` makes up for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fcsd.checkpoint import resolve
from fcsd.config import Recipe, Train
from fcsd.distill.teacher import teacher_name
from fcsd.errors import ConfigError
from fcsd.launch import World
from fcsd.models.build import arch_of, experts_of, register, wiring_of


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
    if recipe.objective.kl and recipe.train.teacher_placement != "replicated":
        _check_model(teacher_name(recipe), degree, hint="set train.teacher_placement: replicated")


def _check_model(name: str, degree: int, hint: str) -> None:
    from fcsd.parallel.autoep import expert_parallel_config

    config = AutoConfig.from_pretrained(resolve(name).path, trust_remote_code=False)
    try:
        expert_parallel_config(arch_of(config), degree)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", hint) from error
    if experts_of(config) % degree:
        raise ConfigError(f"train.expert_parallel {degree} does not divide the {experts_of(config)} experts of {name}")


def shard(model: PreTrainedModel, train: Train) -> None:
    """Leaves this process its share of the experts, if the run is expert-parallel."""
    if train.expert_parallel > 1:
        from fcsd.parallel.autoep import shard_experts

        shard_experts(model, arch_of(model.config), train.expert_parallel)


def wire(model: PreTrainedModel, train: Train) -> None:
    """Lets a sharded model, on its device, compute its own wiring in its own parts, in flight as the recipe says."""
    if train.expert_parallel > 1:
        from fcsd.parallel.overlap import overlap

        overlap(model, wiring_of(model.config), train.overlap)


def place_teacher(teacher: PreTrainedModel, train: Train, world: World) -> PreTrainedModel:
    """The teacher on this process's device, its experts sharded as the student's unless the recipe replicates them."""
    if train.teacher_placement == "replicated":
        return teacher.to(world.device)  # type: ignore[arg-type]
    shard(teacher, train)
    teacher.eval().to(world.device)  # type: ignore[arg-type]
    wire(teacher, train)
    return teacher


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
