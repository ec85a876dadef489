"""Takes one optimizer step over all ranks, judges whether its numbers are finite, and measures held-out loss."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.config import Recipe
from fcsd.distill.data.rows import Mixture, Rows, batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.optim.update import update
from fcsd.distill.step.engine import Training, phase
from fcsd.distill.step.feed import MicroBatch, gather_step, to_device
from fcsd.errors import BadInputError, NonFiniteError
from fcsd.launch.world import World


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step, counted from 1.

    It rises linearly to ``lr`` during the warmup and then follows the schedule down to ``min_lr``. With the schedule
    ``constant`` it stays at ``lr``.
    """
    optim = recipe.optim
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - optim.warmup_steps) / (recipe.schedule_steps - optim.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return optim.min_lr + (optim.lr - optim.min_lr) * shape[optim.schedule]


class Readback:
    """Copies named scalars to pinned host memory as soon as the device has computed them.

    The constructor only launches the copy. ``wait`` waits for the copy, but not for work that was launched after it.

    Args:
        values: by name, tensors of one element, all on one device, or numbers that are already on the host.
    """

    def __init__(self, values: dict[str, Tensor | float]) -> None:
        self._values = values
        self._names = [name for name, value in values.items() if isinstance(value, Tensor)]
        tensors = [value.detach().double() for value in values.values() if isinstance(value, Tensor)]
        stacked = torch.stack(tensors) if tensors else torch.empty(0)  # fp64 holds every fp32 value exactly
        self._copied: torch.cuda.Event | None = None
        self._host = stacked
        if stacked.is_cuda:
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> dict[str, float]:
        """The numbers by name, in the order in which they were given."""
        if self._copied is not None:
            self._copied.synchronize()
        found = dict(zip(self._names, self._host.tolist(), strict=True))
        return {name: found[name] if name in found else float(value) for name, value in self._values.items()}


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched, which the device may not have finished yet.

    Attributes:
        number: the number of the step, counted from 1.
        rate: the learning rate of the step.
        weights: the weights of the loss terms.
        numbers: the copy to the host of the loss terms, ``grad_norm``, and ``counted``, the number of positions with a
            label.
        rows: the numbers of the step's rows over all ranks.
    """

    number: int
    rate: float
    weights: dict[str, float]
    numbers: Readback
    rows: range

    def metrics(self) -> dict[str, float]:
        """``loss``, its unweighted terms, ``lr`` and ``grad_norm``; waits until the step is taken.

        Raises:
            BadInputError: no position of the step's rows counts in the loss.
        """
        found = self.numbers.wait()
        if found.pop("counted") == 0:
            raise BadInputError(
                f"step {self.number}, rows {self.rows.start} to {self.rows.stop - 1}: no token counts in the loss",
                hint="`fcsd distill RECIPE --dry-run` shows what counts; raise data.seq_len or train.batch_tokens",
            )
        norm = found.pop("grad_norm")
        loss = sum(weight * found[name] for name, weight in self.weights.items())
        return {"loss": loss, **found, "lr": self.rate, "grad_norm": norm}


def launch_step(training: Training, micros: list[MicroBatch], recipe: Recipe, world: World, step: int) -> LaunchedStep:
    """Launches a step. The host does not wait until the device has taken it, except in two places.

    With divided experts, each MoE layer needs the splits of its all-to-alls on the host, to size buffers and
    collectives. In some cases of the table in ``distill.optim.update``, the host decides whether the step is taken, and
    ``update`` then waits for the gradient norm.

    The loss is that of the global batch before the weights change. If the loss or a gradient is not finite on any rank,
    ``grad_norm`` is not finite either, and no rank changes its weights or its optimizer's moments.

    Args:
        micros: this rank's part of the step, on the device.
        step: the number of the step, counted from 1.
    """
    engine, weights = training.engine, recipe.objective.weights
    counted = torch.stack([micro.counted for micro in micros]).sum()
    dist.all_reduce(counted, group=world.group)
    denominator = counted.clamp(min=1) if recipe.objective.reduction == "mean" else torch.ones_like(counted)
    rate = learning_rate(recipe, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    totals = torch.zeros(len(weights), device=world.device)
    norm: Tensor | float = 0.0
    for micro in micros:
        with phase("teacher"):
            targets = training.source.get_targets(micro.columns)
        terms = engine(micro.columns, targets, denominator, tuple(weights))
        del targets  # the loss has read them
        totals += torch.stack([terms[name].detach() for name in weights])
        loss = torch.stack([weight * terms[name] for name, weight in weights.items()]).sum()
        last = micro is micros[-1]
        if last:
            dist.all_reduce(totals, group=world.group)
            # If a term is not finite on one rank, the loss becomes NaN on all. The gradients are then NaN as well, and
            # the update skips the step.
            loss = loss * torch.where(totals.isfinite().all(), 1.0, math.nan)
        # The engine averages gradients over the ranks. Each term is already divided by the positions of the global
        # batch, so the loss is multiplied by the number of ranks.
        engine.backward(loss * world.size, scale_wrt_gas=False)
        if last:
            norm = update(engine, recipe, world)
        else:
            engine.step()  # counts the micro-batch
    numbers = Readback({**dict(zip(weights, totals, strict=True)), "grad_norm": norm, "counted": counted})
    rows = range((step - 1) * recipe.rows_per_step, step * recipe.rows_per_step)
    return LaunchedStep(step, rate, weights, numbers, rows)


def train_step(training: Training, rows: Mixture, recipe: Recipe, world: World, step: int) -> dict[str, float]:
    """Takes a step in one thread and waits for it. This is the reference of ``launch_step`` with ``distill.step.feed``.

    Args:
        step: the number of the step, counted from 1.

    Returns: the metrics of the step.
    """
    gathered = gather_step(rows, recipe, world, step)
    micros = [to_device(micro, world.device) for micro in gathered]
    return launch_step(training, micros, recipe, world, step).metrics()


@torch.no_grad()
def measure(
    training: Training, rows: Rows, recipe: Recipe, world: World, advance: Callable[[float], None] = lambda tokens: None
) -> dict[str, float]:
    """Measures the loss terms per token over all rows of one epoch. No random number is drawn.

    Args:
        advance: is called with the number of tokens that were measured since the call before, on all ranks together. An
            error that it raises on all of them ends the measurement.

    Returns: the terms ``objective.measures`` by name.
    """
    engine, terms = training.engine, recipe.objective.measures
    micro = recipe.train.micro_batch_size
    totals = torch.zeros(len(terms) + 1, device=world.device, dtype=torch.float64)
    one = torch.ones((), device=world.device)
    engine.eval()
    try:
        for first in range(0, rows.per_epoch, micro * world.size):
            start = first + world.rank * micro
            numbers = range(start, min(start + micro, rows.per_epoch))
            # All ranks must run the model equally often. A rank without rows left runs it on a row that does not count.
            columns = batch(rows, numbers or [0], recipe.train.draft_head)
            data = {name: column.to(world.device) for name, column in columns.items()}
            if not numbers:
                data["labels"].fill_(IGNORE)
            losses = engine(data, training.source.get_targets(data), one, terms)
            totals += torch.stack([*(losses[name] for name in terms), (data["labels"] != IGNORE).sum()])
            advance(min(micro * world.size, rows.per_epoch - first) * recipe.data.seq_len)
    finally:
        engine.train()
    dist.all_reduce(totals, group=world.group)
    *sums, positions = totals.tolist()
    return {name: value / max(1, positions) for name, value in zip(terms, sums, strict=True)}


class Skips:
    """The steps whose loss or gradients were not finite. They change no weight, and a few in a row may be skipped.

    All ranks come to the same decisions, because they see the same metrics.

    Args:
        progress: the progress stored in the checkpoint from which the run continues.
    """

    def __init__(self, recipe: Recipe, world: World, progress: dict[str, Any]) -> None:
        self._allowed, self._prints = recipe.faults.nonfinite_skip, world.rank == 0
        self._rows = recipe.rows_per_step
        self.total, self._in_a_row = progress.get("skipped", [0, 0])

    def judge(self, step: int, metrics: dict[str, float], checkpoint: Callable[[], Path | None]) -> bool:
        """Whether the step was skipped. If so, ``skipped_steps`` is added to ``metrics``.

        Args:
            checkpoint: returns the last good checkpoint, which the error names; None if there is none.

        Raises:
            NonFiniteError: more than ``faults.nonfinite_skip`` steps in a row were not finite.
        """
        if all(map(math.isfinite, metrics.values())):
            self._in_a_row = 0
            return False
        self.total += 1
        self._in_a_row += 1
        metrics["skipped_steps"] = self.total
        first = (step - 1) * self._rows
        what = f"step {step}, rows {first} to {first + self._rows - 1}: "
        what += ", ".join(f"{name} {value:g}" for name, value in metrics.items() if not math.isfinite(value))
        if self._in_a_row > self._allowed:
            raise NonFiniteError(
                what,
                hint=f"the last good checkpoint is {checkpoint() or 'the start'}; lower optim.lr, use fp32, or let "
                "faults.nonfinite_skip pass over single batches",
            )
        if self._prints:
            print(f"warning: {what}; skipped, {self._in_a_row} of {self._allowed} in a row", file=sys.stderr)
        return True

    def progress(self) -> dict[str, Any]:
        """What a checkpoint stores: the number of skipped steps in total and in a row."""
        return {"skipped": [self.total, self._in_a_row]}
