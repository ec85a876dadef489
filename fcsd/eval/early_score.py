"""Scores a model on a benchmark during training, so that a run can stop early."""

from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.config import EarlyStop
from fcsd.eval.code.sandbox import find_sandbox
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.results import PERPLEXITIES
from fcsd.eval.score import Score, Scorer
from fcsd.eval.suite import EVALPLUS, SANDBOX, select
from fcsd.eval.tasks import load_tasks, questions_sha256
from fcsd.launch.shared_work import Team
from fcsd.launch.world import World

TASK = "MBPP+"
# Names of the code benchmarks that are valid for every suite.
_COLUMNS = {"mbpp_plus": TASK, "humaneval_plus": "HEval+"}


def scorer(settings: EarlyStop, *, accept_unsafe_exec: bool = False) -> Scorer | None:
    """The benchmark that a recipe names for early stopping; None if its metric is not a benchmark.

    Raises:
        ConfigError: the suite or task does not exist.
        BadInputError: the task's data are missing.
        FcsdError: generated programs would have to run without a sandbox.
    """
    if settings.benchmark is None:
        return None
    task = _COLUMNS.get(settings.benchmark, settings.benchmark)
    (benchmark,) = select(settings.suite, [task])
    mirror = None if settings.data_mirror is None else Path(settings.data_mirror).absolute()
    with load_tasks([benchmark], mirror) as (loaded,):  # missing data is an error before training
        questions = questions_sha256(loaded)
    if benchmark.harness in (SANDBOX, EVALPLUS):
        find_sandbox(accept_unsafe_exec=accept_unsafe_exec)
    run = partial(score, suite=settings.suite, task=task, data_mirror=mirror, limit=settings.limit)
    best = "min" if benchmark.metric in PERPLEXITIES else "max"
    return Scorer(partial(run, accept_unsafe_exec=accept_unsafe_exec), best, questions)


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
    accept_unsafe_exec: bool = False,
    timeout_s: float = 1800.0,
) -> Score:
    """Score a model that is being trained; every rank of ``group`` calls this and gets the same score.

    The ranks share the prompts and generate in step, so that experts, or under ZeRO-3 all weights, may be divided among
    them. Rank 0 starts a process that judges the generated programs, at most twice, and sends the result, or the
    error, to the other ranks. The state of the random number generators, the mode of every module and the
    placement of the weights are restored, so that the training that follows does not change.

    Args:
        model: the model in training, which is a DeepSpeed engine's ``module``.
        step: the optimizer step; it names the measurement in messages.
        group: the ranks; None for all of the default process group, or for this process where there is none.
        suite: ``strict`` for EvalPlus' base and plus tests, ``paper`` for lm-eval's three base asserts.
        data_mirror, limit, accept_unsafe_exec: as for ``evaluate_models``.
        timeout_s: how long a rank waits for any other, in seconds.

    Raises:
        ConfigError: the task does not exist.
        NonFiniteError: the model gives NaN or infinite logits.
        FcsdError: there is no sandbox, or a program has no verdict. All ranks raise it.
        RuntimeError: another rank did not answer within ``timeout_s`` seconds.
    """
    team = None
    if dist.is_initialized():
        members = tuple(dist.get_process_group_ranks(group))
        channel = _channel(dist.group.WORLD, members, timeout_s)
        team = Team(World(dist.get_rank(group), len(members), model.device, channel), lockstep=True)
    (result,) = evaluate_models(
        [Loaded(f"step {step}", model, tokenizer)],
        suite=suite,
        tasks=[task],
        data_mirror=data_mirror,
        limit=limit,
        accept_unsafe_exec=accept_unsafe_exec,
        team=team,
    )
    return Score(result["value"], result["stderr"], result["n"])


@cache
def _channel(world: Any, members: tuple[int, ...], timeout_s: float) -> Any:
    """A process group for sending results, whose ranks may have to wait for a long time.

    The group is made once and not for every score. After a group is destroyed, another one with the same members would
    read the addresses of the old group's members.

    Args:
        world: the default process group, to which the new one belongs.
        members: its ranks there.
    """
    timeout = timedelta(seconds=timeout_s)
    return dist.new_group(list(members), timeout=timeout, backend="gloo", use_local_synchronization=True)
