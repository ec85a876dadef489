"""Chooses the implementation of AdamW that a recipe asks for, and the groups of parameters that it updates.

AdamW runs in one of three implementations. ``OneProcessAdamW`` updates the weights of a run of one process, and that of
bitsandbytes has moments in 8 bits. In all other runs DeepSpeed makes torch's fused AdamW from its configuration
(``fcsd.distill.step.engine.deepspeed_config``). ``update`` clips and skips for all of them.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fcsd.config import Recipe
from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.parallel.expert.autoep import trains_divided
from fcsd.parallel.partitions import GROUP


def adamw_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of AdamW, whichever implementation runs."""
    optim = recipe.optim
    return {"lr": optim.lr, "betas": list(optim.betas), "eps": 1e-8, "weight_decay": optim.weight_decay}


def updates_alone(recipe: Recipe, processes: int) -> bool:
    """Whether a run updates its weights with ``OneProcessAdamW``: one that would use ZeRO, but has one process.

    It trains in bf16, its states are in fp32 on the device, and its rows are not rounded by ``parallel.quantised``.
    """
    optim, parallel = recipe.optim, recipe.parallel
    plain = (recipe.train.dtype, optim.offload, optim.moments) == ("bf16", "none", "fp32")
    return processes == 1 and parallel.zero_stage in (1, 2) and plain and not parallel.quantised.any


def own_adamw(recipe: Recipe, alone: bool) -> Callable[[Any], Optimizer] | None:
    """The function that makes the optimizer for ``deepspeed.initialize``; None if its configuration describes it.

    Args:
        alone: whether the optimizer is ``OneProcessAdamW``.
    """
    if recipe.optim.moments == "8bit":
        return lambda parameters: _eight_bit(parameters, adamw_settings(recipe))
    if not alone:
        return None
    return lambda parameters: OneProcessAdamW(parameters, **adamw_settings(recipe), grad_clip=recipe.optim.grad_clip)


def _eight_bit(parameters: Any, settings: dict[str, Any]) -> Optimizer:
    """AdamW of bitsandbytes, which runs on a GPU and on a CPU."""
    from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]
    from deepspeed.moe.utils import configure_moe_param_groups, is_moe_param

    each = [one for group in parameters for one in (group["params"] if isinstance(group, dict) else [group])]
    if any(map(is_moe_param, each)):  # DeepSpeed separates the experts itself only for an optimizer that it makes
        parameters = configure_moe_param_groups(parameters)
    return AdamW8bit(parameters, **settings)


def parameter_groups(student: nn.Module, recipe: Recipe) -> list[Any]:
    """The trained parameters for the optimizer. Parameters without weight decay form groups of their own, if any.

    Norm gains and biases have no weight decay. A parameter counts as one of them if it is a vector or if the last part
    of its name contains ``bias``. The name is needed because experts stack their biases into matrices.

    In its step ZeRO copies all gradients of a group, once as they are and once in fp32. Groups are therefore not larger
    than ``GROUP``. With divided experts DeepSpeed itself limits the groups of experts.
    """
    trained = [(name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [parameter for _, parameter in trained]}]
    if recipe.optim.weight_decay:
        by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in trained:
            by_decay[parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]].append(parameter)
        decayed = {"name": "decayed", "params": by_decay[True], "weight_decay": recipe.optim.weight_decay}
        spared = {"name": "not decayed", "params": by_decay[False], "weight_decay": 0.0}
        groups = [group for group in (decayed, spared) if group["params"]]
    if recipe.parallel.zero_stage and not _divided_by_deepspeed(recipe, student):
        groups = [{**group, "params": part} for group in groups for part in _parts(group["params"])]
    return groups if len(groups) > 1 or "weight_decay" in groups[0] else groups[0]["params"]


def _parts(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in lists of at most ``GROUP`` elements. A larger parameter is a list of its own."""
    parts: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        elements = parameter.numel()
        if parts[-1] and size + elements > GROUP:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += elements
    return parts


def _divided_by_deepspeed(recipe: Recipe, student: nn.Module) -> bool:
    """Whether DeepSpeed separates the experts from the other parameters and limits the size of their groups."""
    if recipe.frozen_beside is not None:
        return any(map(trains_divided, student.parameters()))
    return recipe.parallel.ep_size > 1 or recipe.parallel.quantised.any
