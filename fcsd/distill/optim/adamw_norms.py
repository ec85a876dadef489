"""The norms of the gradients by which AdamW's steps are clipped and skipped, for each way in which gradients lie.

``update`` says which runs take which norm.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.config import Recipe
from fcsd.distill.train_engine import TrainEngine
from fcsd.launch.world import World
from fcsd.parallel.tensor.shard import SHARDED


def found_inf(norm: Tensor) -> Tensor:
    """The flag by which torch's fused AdamW skips a step: fp32 1 if the norm is not finite, else 0."""
    return (~norm.isfinite()).float()


def l2_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The norm of all elements of the tensors, an fp32 scalar; squares and sums are in fp32, whatever their dtype."""
    if not tensors:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(list(norms)).norm()


def partitions_norm(zero: Any, dtype: torch.dtype) -> Tensor:
    """The L2 norm of all gradients of ZeRO-1 or ZeRO-2, ``[]`` fp32; infinite if a gradient is not finite.

    It replaces DeepSpeed's ``scaled_global_norm``, which is slow on a GPU for two reasons. For each group of parameters
    the host waits for the device twice, to replace a norm that is not finite by -1. And each gradient is converted to
    fp64 before its squares are summed. Here the host does not wait, and all groups are reduced together.

    Args:
        zero: DeepSpeed's optimizer. Each rank has the gradients of its partitions in ``averaged_gradients``, a list for
            each group of parameters. No gradient is in the partitions of two ranks, unless they shard a model.
        dtype: the dtype of the sums over a tensor. With fp64, which needs a copy of the gradient, the result has the
            bits of DeepSpeed's norm for an optimizer on the host. For one beside the weights DeepSpeed takes the root
            in fp32, whose last bit may differ.
    """
    squares = []
    for number in range(len(zero.bit16_groups)):
        partition = zero.averaged_gradients[number]
        gradients = [gradient for gradient in partition if not getattr(gradient, "_zero_padding", False)]
        if zero.model_parallel_rank > 0:  # what every tensor-parallel rank has counts once
            members = zero.params_in_partition[number]
            gradients = [each for each, of in zip(gradients, members, strict=False) if getattr(of, SHARDED, False)]
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
            squares.append(torch.stack(list(norms)).double().square().sum().float())
        else:
            squares.append(torch.zeros((), device=zero.device))
    whole = torch.stack(squares)
    dist.all_reduce(whole, group=zero.dp_process_group)
    if zero.model_parallel_world_size > 1:
        dist.all_reduce(whole, group=zero.model_parallel_group)
    norms = whole.double().sqrt().float()  # a root in fp32 may be wrong in its last bit on CPUs
    return torch.linalg.vector_norm(norms).nan_to_num(nan=math.inf, posinf=math.inf)


def global_norm(engine: TrainEngine, recipe: Recipe, world: World) -> Tensor:
    """The L2 norm of all gradients for ZeRO stage 0, including those of the experts on other processes.

    DeepSpeed's own norm covers only the experts of this process.
    """
    from deepspeed.moe.utils import is_moe_param

    ep_size = recipe.parallel.ep_size
    gradients: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            gradients[is_moe_param(parameter)].append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(gradients[False])
    if gradients[True]:
        squared = torch.nn.utils.get_total_norm(gradients[True]).square()
        dist.all_reduce(squared)  # each expert is summed world.size / ep_size times
        norm = (norm.square() + squared * ep_size / world.size).sqrt()
    return norm
