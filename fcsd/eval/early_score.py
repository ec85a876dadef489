"""A score in the middle of training, by which to stop early: a benchmark of the model as it is now."""

from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.config import EarlyStop
from fcsd.eval.code.sandbox import find_sandbox
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.results import PERPLEXITIES
from fcsd.eval.score import Score, Scorer
from fcsd.eval.suite import EVALPLUS, SANDBOX, select
from fcsd.eval.tasks import load_tasks
from fcsd.launch.shared_work import Team
from fcsd.launch.world import World

TASK = "MBPP+"
# Names of the code benchmarks that hold in every suite.
_COLUMNS = {"mbpp_plus": TASK, "humaneval_plus": "HEval+"}


def scorer(settings: EarlyStop, *, accept_unsafe_exec: bool = False) -> Scorer | None:
    """What the recipe wants a run to be scored with; None where that takes no benchmark.

    Raises:
        ConfigError: no such suite or task.
        BadInputError: the task's data are missing.
        FcsdError: generated programs would have to run without a sandbox.
    """
    if settings.benchmark is None:
        return None
    task = _COLUMNS.get(settings.benchmark, settings.benchmark)
    (row,) = select(settings.suite, [task])
    mirror = None if settings.data_mirror is None else Path(settings.data_mirror).absolute()
    with load_tasks([row], mirror):  # better missing now than after a thousand steps
        pass
    if row.harness in (SANDBOX, EVALPLUS):
        find_sandbox(accept_unsafe_exec=accept_unsafe_exec)
    run = partial(score, suite=settings.suite, task=task, data_mirror=mirror, limit=settings.limit)
    return Scorer(partial(run, accept_unsafe_exec=accept_unsafe_exec), "min" if row.metric in PERPLEXITIES else "max")


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
        data_mirror, limit, accept_unsafe_exec: as for ``evaluate_models``; batch_size: as for ``Engine``.
        timeout_s: how long a rank waits for any other, seconds.

    Raises:
        ConfigError: no such task.
        NonFiniteError: the model gives NaN or infinite logits.
        FcsdError: no sandbox, or no verdict; on all ranks.
        RuntimeError: another rank said nothing for ``timeout_s`` seconds.
    """
    team = None
    if dist.is_initialized():
        members = tuple(dist.get_process_group_ranks(group))
        channel = _channel(dist.group.WORLD, members, timeout_s)
        team = Team(World(dist.get_rank(group), len(members), model.device, channel), lockstep=True)
    (row,) = evaluate_models(
        [Loaded(f"step {step}", model, tokenizer)],
        suite=suite,
        tasks=[task],
        data_mirror=data_mirror,
        limit=limit,
        engine=Engine(batch_size=batch_size),
        accept_unsafe_exec=accept_unsafe_exec,
        team=team,
    )
    return Score(row["value"], row["stderr"], row["n"])


@cache
def _channel(world: Any, members: tuple[int, ...], timeout_s: float) -> Any:
    """A group of its own for verdicts, which are small and wait for long; made once, not for every score.

    A group that was destroyed cannot be made again: its new members would find the old ones' addresses.

    Args:
        world: the default process group, to which the new one belongs.
        members: its ranks there.
    """
    timeout = timedelta(seconds=timeout_s)
    return dist.new_group(list(members), timeout=timeout, backend="gloo", use_local_synchronization=True)
