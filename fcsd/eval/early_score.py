"""A score in the middle of training, by which to stop early: MBPP+ of the model as it is now."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.eval.harness import Loaded, evaluate
from fcsd.eval.team import Team
from fcsd.launch import World

TASK = "MBPP+"


@dataclass(frozen=True)
class Score:
    """A fraction, its standard error, and the number of items it was measured on."""

    value: float
    stderr: float
    n: int


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    group: dist.ProcessGroup | None,
    *,
    suite: str = "strict",
    task: str = TASK,
    data_mirror: str | Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    accept_unsafe_exec: bool = False,
    timeout_s: float = 1800.0,
) -> Score:
    """Score a model that is being trained; every rank of ``group`` calls this and gets the same answer.

    Prompts are shared out among the ranks, which generate in step, so that a model whose experts (or, under ZeRO-3,
    weights) are spread over them works too. Rank 0 has the programs judged by a process of its own, started twice
    at most, and tells the others what came out, an error included. Random number generators, the mode of every
    module and the placement of the weights are as they were afterwards: training goes on as if nothing had been.

    Args:
        model: what is being trained, a DeepSpeed engine's ``module``.
        step: the optimizer step; it names the measurement in messages.
        group: the ranks; None for all of the default process group, or for this process where there is none.
        suite: ``strict`` for EvalPlus' base and plus tests, ``paper`` for lm-eval's three base asserts.
        task: a row of the suite, by column.
        data_mirror, limit, batch_size, accept_unsafe_exec: as for ``harness.evaluate``.
        timeout_s: how long a rank waits for any other, seconds.

    Raises:
        ConfigError: no such task.
        NonFiniteError: the model gives NaN or infinite logits.
        FcsdError: no sandbox, or no verdict; on all ranks.
        RuntimeError: another rank said nothing for ``timeout_s`` seconds.
    """
    team: Team | None = None
    talk: Any = None
    if dist.is_initialized():
        members: Sequence[int] = dist.get_process_group_ranks(group)
        # Verdicts are small and wait for long: they travel by a group of their own, with its own patience.
        talk = dist.new_group(
            list(members), timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
        )
        team = Team(World(dist.get_rank(group), len(members), model.device, talk), lockstep=True)
    try:
        (row,) = evaluate(
            [Loaded(f"step {step}", model, tokenizer)],
            suite=suite,
            tasks=[task],
            data_mirror=data_mirror,
            limit=limit,
            batch_size=batch_size,
            accept_unsafe_exec=accept_unsafe_exec,
            team=team,
        )
    finally:
        if talk is not None:
            dist.destroy_process_group(talk)
    return Score(row["value"], row["stderr"], row["n"])
