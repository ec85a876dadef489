"""Compares the loss and the norm of every gradient of two variants of a training step."""

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.distill.train_engine import PassEngine
from fcsd.launch.world import World


def loss_and_norms(engine: PassEngine, ids: Tensor) -> dict[str, float]:
    """Runs a step; returns its loss and the norm of every gradient on this rank, before averaging over the ranks.

    Args:
        ids: token ids ``[batch, seq]``.
    """
    seen: dict[str, Tensor] = {}
    hooks = [
        parameter.register_hook(lambda grad, name=name: seen.update({name: grad.double().norm()}))
        for name, parameter in engine.module.named_parameters()
    ]
    loss = engine(ids)
    engine.backward(loss)
    engine.step()
    for hook in hooks:
        hook.remove()
    return {"loss": loss.item(), **{name: norm.item() for name, norm in seen.items()}}


def worst_difference(one: dict[str, float], other: dict[str, float], world: World) -> float:
    """The largest relative difference of two results of ``loss_and_norms``, over all ranks."""
    assert one.keys() == other.keys()
    worst = max(abs(one[k] - other[k]) / max(abs(one[k]), 1e-30) for k in one)
    gathered = torch.tensor(worst, device=world.device)
    dist.all_reduce(gathered, dist.ReduceOp.MAX)
    return gathered.item()
