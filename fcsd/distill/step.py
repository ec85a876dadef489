"""One optimizer step, and one measurement on held-out text, over all ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.config import Recipe
from fcsd.distill.data.rows import Mixture, Rows, batch
from fcsd.distill.expert_parallel import clip_without_zero
from fcsd.distill.losses import IGNORE
from fcsd.distill.teacher.targets import Teacher
from fcsd.launch.world import World


def loss_weights(recipe: Recipe) -> dict[str, float]:
    """The terms of the loss that count, each with its weight."""
    objective = recipe.objective
    weights = {"kl": objective.kl, "sft": objective.sft, "hidden": objective.hidden.weight}
    return {name: weight for name, weight in weights.items() if weight}


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of step 1, 2, ...: a linear rise to ``lr``, then the schedule down to ``min_lr``."""
    optim = recipe.optim
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - optim.warmup_steps) / (recipe.schedule_steps - optim.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return optim.min_lr + (optim.lr - optim.min_lr) * shape[optim.schedule]


def rows_of_step(recipe: Recipe, world: World, step: int) -> list[range]:
    """The rows of this rank's micro-batches in step 1, 2, ...; together the ranks cover the step's rows once."""
    micro, whole = recipe.train.micro_batch_size, recipe.train.batch_tokens // recipe.data.seq_len
    first = (step - 1) * whole + world.rank * micro
    return [range(start, start + micro) for start in range(first, step * whole, micro * world.size)]


def train_step(
    engine: Any,
    teacher: Teacher | None,
    rows: Mixture,
    recipe: Recipe,
    world: World,
    step: int,
) -> dict[str, float]:
    """Takes step 1, 2, ... and returns ``loss``, its unweighted terms, ``lr`` and ``grad_norm``.

    The loss is of the global batch before the step. If it or a gradient is not finite on any rank, ``grad_norm`` is
    not finite either, and no rank changes its weights or its optimizer's moments.
    """
    weights = loss_weights(recipe)
    numbers = rows_of_step(recipe, world, step)
    batches = [_to(world, batch(rows, micro)) for micro in numbers]
    positions = torch.stack([(micro["labels"] != IGNORE).sum() for micro in batches]).sum()
    dist.all_reduce(positions)
    denominator = positions.clamp(min=1) if recipe.objective.reduction == "mean" else torch.ones_like(positions)
    rate = learning_rate(recipe, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    totals = torch.zeros(len(weights), device=world.device)
    norm = None
    for micro, own in zip(batches, numbers, strict=True):
        targets = None if teacher is None else teacher(micro, own)
        terms = engine(micro, targets, denominator, tuple(weights))
        totals += torch.stack([terms[name].detach() for name in weights])
        loss = torch.stack([weight * terms[name] for name, weight in weights.items()]).sum()
        if micro is batches[-1]:
            dist.all_reduce(totals)
            # Not finite on one rank is NaN on all. Gradients of NaN make the engine drop the step, as it must.
            loss = loss * torch.where(totals.isfinite().all(), 1.0, math.nan)
        # Each term is divided by the global batch already; the engine would average the ranks' gradients.
        engine.backward(loss * world.size, scale_wrt_gas=False)
        if micro is batches[-1] and isinstance(engine.optimizer, torch.optim.Optimizer):
            norm = clip_without_zero(engine, recipe, world)
            if not norm.isfinite():  # torch's optimizer would take the step
                engine.zero_grad()
                engine.micro_steps += 1
                break
        engine.step()
    values = dict(zip(weights, totals.tolist(), strict=True))
    loss = sum(weight * values[name] for name, weight in weights.items())
    norm = engine.get_global_grad_norm() if norm is None else norm
    return {"loss": loss, **values, "lr": rate, "grad_norm": float(norm or 0.0)}


@torch.no_grad()
def measure(engine: Any, teacher: Teacher | None, rows: Rows, recipe: Recipe, world: World) -> dict[str, float]:
    """The terms per token over all rows of one epoch: cross-entropy and, with a teacher, KL; ``hidden`` if it counts.

    No random number is drawn.
    """
    terms = ("sft",) if teacher is None else ("kl", "sft")
    if recipe.objective.hidden.weight:
        terms = (*terms, "hidden")
    micro = recipe.train.micro_batch_size
    totals = torch.zeros(len(terms) + 1, device=world.device, dtype=torch.float64)
    one = torch.ones((), device=world.device)
    engine.eval()
    for first in range(0, rows.per_epoch, micro * world.size):
        start = first + world.rank * micro
        numbers = range(start, min(start + micro, rows.per_epoch))
        # All ranks run equally often; one without rows left runs on a row that does not count.
        data = _to(world, batch(rows, numbers or [0]))
        if not numbers:
            data["labels"].fill_(IGNORE)
        targets = None if teacher is None else teacher(data, numbers or [0])
        losses = engine(data, targets, one, terms)
        totals += torch.stack([*(losses[name] for name in terms), (data["labels"] != IGNORE).sum()])
    engine.train()
    dist.all_reduce(totals)
    *sums, positions = totals.tolist()
    return {f"held_out_{name}": value / max(1, positions) for name, value in zip(terms, sums, strict=True)}


def _to(world: World, data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(world.device) for name, tensor in data.items()}
