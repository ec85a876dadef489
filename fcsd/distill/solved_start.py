"""Corrects the weights of a student before its first step, on rows of the run itself (``init.solve``)."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fcsd.config import Recipe
from fcsd.distill.data.rows import Mixture, batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.teacher.original import final_hidden
from fcsd.launch.world import World
from fcsd.models.build import load_model, unwired, wire
from fcsd.models.solved import solve_start


def calibration_rows(recipe: Recipe) -> int:
    """How many of the run's first rows hold ``init.solve_tokens`` tokens; at most all rows of its schedule."""
    whole = recipe.schedule_steps * recipe.rows_per_step
    return min(whole, -(-recipe.init.solve_tokens // recipe.data.seq_len))


def solve_student(student: PreTrainedModel, source: Path, recipe: Recipe, rows: Mixture, world: World) -> None:
    """Correct the weights of a student in place, as ``init.solve`` says; all processes get the same weights.

    The original is loaded once more for this and freed afterwards. The teacher is not used: it may be another model, or
    there may be none.

    Args:
        student: the student in eval mode, before the engine is built.
        source: the directory that the student was made from.
        rows: the rows of the run. The processes divide the first ones among themselves. Only tokens that count in the
            loss count here.
    """
    original = load_model(source, dtype=student.dtype, device=world.device, config=student.config)
    wire(original, unwired())
    micro, count = recipe.train.micro_batch_size, calibration_rows(recipe)
    batches = []
    for first in range(world.rank * micro, count, micro * world.size):
        columns = batch(rows, range(first, min(first + micro, count)))
        columns = {name: column.to(world.device) for name, column in columns.items()}
        batches.append((columns, columns["labels"] != IGNORE))

    def sum_over_processes(moments: torch.Tensor) -> None:
        if world.size > 1:
            dist.all_reduce(moments, group=world.group)

    solve_start(student, original, batches, recipe.init.solve, final_hidden, sum_over_processes)
