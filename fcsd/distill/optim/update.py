"""The update of the weights: gradients are clipped, and a step whose gradients are not finite is skipped.

Both decisions depend on the norm of the gradients. They are made on the device where the optimizer allows it, because a
host that reads the norm waits for the whole backward pass. torch's fused AdamW takes a flag ``found_inf``: if it is 1,
the kernel leaves weights, moments and the count of steps as they are.

=====================  =========================================  ========================================
ZeRO stage, weights    the norm is computed by                    a norm that is not finite is judged
=====================  =========================================  ========================================
1 and 2, one process   ``OneProcessAdamW`` in bf16                on the device, by the optimizer
0, fp32                ``global_norm``                            on the device, by ``found_inf``
0, bf16                ``global_norm``                            on the host: DeepSpeed's wrapper asks, too
1 and 2, bf16          ``partitions_norm``                        on the device, by ``found_inf``
1 and 2, fp32          ``partitions_norm``                        on the host, by DeepSpeed
1 and 2, on the host   DeepSpeed, over all partitions             on the host, by DeepSpeed
1 and 2, 8-bit         ``partitions_norm``                        on the host, by DeepSpeed
=====================  =========================================  ========================================

With ``optim.offload: host`` AdamW itself runs on the host, which therefore waits for the gradients in any case.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.config import Recipe
from fcsd.distill.optim.adamw_norms import found_inf, global_norm, partitions_norm
from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.distill.train_engine import TrainEngine
from fcsd.kernels.adamw import clip_factor
from fcsd.launch.world import World


def install(engine: TrainEngine, recipe: Recipe) -> None:
    """Makes ZeRO's inner optimizer clip the gradients by a hook. Call this after a checkpoint is loaded.

    DeepSpeed's ``step`` would wait for the norm twice: once to decide whether to skip the step, and once to clip.
    ``deepspeed_config`` turns clipping off and, for bf16 weights, the decision. The hook does both on the device. The
    norm is that of ``partitions_norm``, because DeepSpeed waits for the device while it computes its own. On the host
    the norm is DeepSpeed's, and the hook saves time in another way: DeepSpeed multiplies all gradients even if the
    factor is 1.
    """
    if not recipe.parallel.zero_stage or isinstance(engine.optimizer, OneProcessAdamW):
        return
    zero, limit, on_device = engine.optimizer, recipe.optim.grad_clip, recipe.optim.offload != "host"
    judged = judges_on_device(recipe)
    if on_device:
        dtype = torch.float32 if engine.device.type == "cuda" else torch.float64
        zero.scaled_global_norm = lambda: partitions_norm(zero, dtype)  # DeepSpeed's step calls it

    def before_step(optimizer: Any, *_: Any) -> None:
        norm = zero._global_grad_norm
        if judged:
            optimizer.found_inf = found_inf(norm)
        factor = clip_factor(norm, limit) if limit else None
        if factor is None or (not on_device and factor == 1):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(factor)

    zero.optimizer.register_step_pre_hook(before_step)


def judges_on_device(recipe: Recipe) -> bool:
    """Whether ZeRO's inner optimizer takes the flag ``found_inf``: torch's fused AdamW on a GPU does."""
    return recipe.optim.offload != "host" and recipe.optim.moments == "fp32"


def optimizer_threads() -> int:
    """The CPU threads of AdamW on the host: an equal share of the cores for each process, or what torch has, if more.

    torchrun gives each process one thread unless ``OMP_NUM_THREADS`` is set.
    """
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))
    return max(len(os.sched_getaffinity(0)) // beside, torch.get_num_threads())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """A block in which torch has ``count`` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def update(engine: TrainEngine, recipe: Recipe, world: World) -> Tensor | float:
    """Clips the gradients and takes the optimizer's step. Call this after the backward pass of the last micro-batch.

    If the norm is not finite, no weight and no moment changes on any rank.

    Returns: the global L2 norm of the gradients before clipping; a number if the host has computed it.
    """
    norm, on_host = _clip(engine, recipe, world), recipe.optim.offload == "host"
    if norm is not None and recipe.train.dtype == "fp32":  # torch's optimizer, called directly, reads found_inf
        engine.optimizer.found_inf = found_inf(norm)
    elif norm is not None and not norm.isfinite():  # the host waits; DeepSpeed's wrapper of bf16 makes it wait anyway
        engine.zero_grad()
        engine.micro_steps += 1
        return norm
    with _threads(optimizer_threads()) if on_host else nullcontext():
        engine.step()
    if norm is None:
        alone = isinstance(engine.optimizer, OneProcessAdamW)
        norm = engine.optimizer.norm if alone else engine.get_global_grad_norm()
    # With the optimizer on the host, the norm is there, too, while the step's other numbers are on the device.
    return 0.0 if norm is None else float(norm) if on_host else norm


def _clip(engine: TrainEngine, recipe: Recipe, world: World) -> Tensor | None:
    """Clips the gradients by their norm and returns it; None where the optimizer does both in its step."""
    if recipe.parallel.zero_stage:
        return None
    norm = global_norm(engine, recipe, world)
    if recipe.optim.grad_clip:
        with_gradient = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(with_gradient, recipe.optim.grad_clip, norm)
    return norm
