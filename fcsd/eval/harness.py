"""Evaluates models on a suite with lm-eval as a library: several models in one process, one result per task."""

import contextlib
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.checkpoint import expect_directory, open_checkpoint
from fcsd.checkpoint.location import short_names
from fcsd.disk import require_folder
from fcsd.errors import ConfigError
from fcsd.eval.code.evalplus_tasks import EvalPlusTask, evalplus_result
from fcsd.eval.code.sandbox import find_sandbox
from fcsd.eval.compare import require_same_engine
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.engine import OWN, Engine, opened, versions
from fcsd.eval.engines.interface import Adapter
from fcsd.eval.perplexity import HELD_OUT, HeldOut, held_out_result
from fcsd.eval.results import COMPARISON, Result, ResultFile, in_mean, shown, shown_answers, write_samples
from fcsd.eval.statistics import spread
from fcsd.eval.suite import EVALPLUS, SANDBOX, is_file, select_any
from fcsd.eval.tasks import LoadedTask, asked_of_each, load_tasks, task_results
from fcsd.launch.shared_work import ALONE, Team

# The time for which a rank waits for the others, which may be judging programs or still be generating.
PATIENCE = timedelta(hours=2)

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model already in memory, for evaluation inside another program such as a training loop."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def evaluate_models(
    models: Sequence[str | Path | Loaded],
    *,
    suite: str = "paper",
    tasks: Sequence[str] | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool | None = None,
    baseline: str | Path | Loaded | None = None,
    data_mirror: str | Path | None = None,
    held_out: str | Path | None = None,
    limit: int | None = None,
    engine: Engine | None = None,
    out: str | Path | None = None,
    log_samples: bool = False,
    accept_unsafe_exec: bool = False,
    team: Team | None = None,
    verdict: bool = False,
) -> list[Result]:
    """Evaluate each model on each task of a suite, or on any tasks of lm-eval.

    Processes started by torchrun share the work; the results are those of one process.

    Args:
        models: directories, hub ids, or models in memory.
        suite: a name in ``suite.SUITES``, or the path of a suite's YAML file, which results call by its stem.
        tasks: some of the suite, by column or task name, and tasks of lm-eval that the suite does not have.
        num_fewshot, apply_chat_template: settings of the named tasks, instead of their own; see ``suite.select_any``.
        baseline: one more model, evaluated first; the others are compared with it afterwards.
        data_mirror: a directory of data sets under their hub names; None for the hub and its cache.
        held_out: a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` text for one more result, the held-out loss; or a
            ``.parquet`` file of token ids; or a folder with files of either kind.
        limit: score only so many questions of every benchmark, spread evenly over its tasks and over each task.
        engine: how the models are run. Of models in memory, only limits and ``generation`` are used.
        out: a directory for one ``<model>.json`` each. Answers are kept there too: an evaluation that was killed and
            is started again repeats none of them.
        log_samples: write every question's prompt, answer and score to ``out/samples/<model>/<suite>/<task>.jsonl``.
        accept_unsafe_exec: run generated programs even where no sandbox is available.
        team: the ranks, if the caller already has a process group; they all make this call.
        verdict: whether a verdict on the mean is needed, so that tasks of which none counts in it are refused.

    Returns:
        One result per model and task: ``model, path, suite, baseline, column, task, metric, filter, value, stderr, n,
        chance, beside, items, settings, settings_sha256, data_sha256, data_files, answers, sandbox, engine,
        versions, seconds``. A task such as LAMBADA has two, the second one for the loss of the right answer.
        ``answers`` says how long generated answers are; see ``Adapter.take_lengths``.
        ``value`` is a fraction (or a loss in nats per token or answer, or a perplexity); ``items`` holds the results of
        the single questions in a fixed order, by which ``compare_models`` pairs models. ``path`` is the model's
        absolute path, or its hub id; None for a model in memory.

    Raises:
        ConfigError: a suite or task is unknown, a task cannot run here, no task counts in the mean of which a verdict
            is needed, two models have the same name, samples are to be written without ``out``, ``out`` cannot be
            written or is the directory of a model, or a model does not take inputs as long as the baseline's.
        BadInputError: data are missing or empty, a prompt is longer than the model takes, or a model cannot be loaded.
        NonFiniteError: a model gives NaN or infinite logits; it gets no score.
        FcsdError: generated programs would have to run without a sandbox.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}")
    if log_samples and out is None:
        raise ConfigError("samples are written beside results, and no directory is given for these", "give --out DIR")
    engine = engine or Engine()
    ordered = named_models(models, baseline)
    text = None if held_out is None else HeldOut(Path(held_out))
    mirror = None if data_mirror is None else Path(data_mirror).absolute()  # loading changes directory
    directory = None if out is None else Path(out)
    if directory is not None:
        require_folder(directory, "--out")
    results: list[dict[str, Any]] = []
    chosen = select_any(suite, tasks, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template)
    suite = Path(suite).stem if is_file(suite) else suite
    engine.check(int(os.environ.get("WORLD_SIZE", "1")) if team is None else 1)
    for _, model in ordered:  # a mistyped name or an unsupported model is refused before data are read
        if isinstance(model, str):
            source = open_checkpoint(model, weights=False, trust_remote_code=True)  # no code is run
            if source.repo_id is None:  # damaged weights of the last model are found before the first is scored
                expect_directory(source.path)
            source.require_usable(headers=source.repo_id is None)
    team = team or _torchrun_team(lockstep=engine.ep_size > 1, together_on_all=engine.backend == OWN)
    with preserved_rng(), load_tasks(chosen, mirror) as loaded_tasks:
        # What follows is refused before hours of work.
        lm_eval = [task.benchmark for task in loaded_tasks if isinstance(task, LoadedTask)]
        beside = [one for one in lm_eval if not in_mean({"metric": one.metric, "beside": one.beside})]
        if verdict and len(beside) == len(loaded_tasks):
            raise ConfigError(
                f"no task counts in the mean, of which a verdict is asked: {', '.join(b.column for b in beside)}",
                "Name one that counts too, such as piqa, or leave --require out.",
            )
        if any(benchmark.harness in (SANDBOX, EVALPLUS) for benchmark in chosen):
            team.on_first(lambda: find_sandbox(accept_unsafe_exec=accept_unsafe_exec))
        lost = sum(bool(benchmark.loss) for benchmark in lm_eval)
        total = len(ordered) * (len(loaded_tasks) + lost + (text is not None))
        if team.leads:
            log.info("%s", announcement(len(ordered), loaded_tasks, text, limit))
        for name, model in ordered:
            ours = _lent(model, engine, team) if isinstance(model, Loaded) else opened(model, engine, directory, team)
            with ours as lm:
                how = {**lm.engine(), "ep_size": engine.ep_size}
                if baseline is not None and results:
                    require_same_engine(name, how, results[0])  # before hours of scores that nothing compares
                file = None if directory is None or not team.leads else ResultFile(directory / f"{name}.json")
                start = time.perf_counter()
                for scored in _results(lm, loaded_tasks, text, limit, accept_unsafe_exec):
                    samples = scored.pop("samples", None)  # the held-out loss has none
                    is_baseline = baseline is not None and (name, model) == ordered[0]
                    result = {"model": name, "path": _path(model), "suite": suite, "baseline": is_baseline, **scored}
                    seconds = round(time.perf_counter() - start, 2)
                    result |= {"engine": how, "versions": versions(engine), "seconds": seconds}
                    results.append(result)
                    if team.leads:
                        log.info("%s  [%d of %d]", summary(result), len(results), total)
                    if file is not None:
                        file.add(result)
                        if log_samples and samples is not None:
                            write_samples(file.path.parent / "samples" / name / suite, result["task"], samples)
                    start = time.perf_counter()
                del lm  # otherwise it would stay in memory beside the next model
    return results


def named_models(
    models: Sequence[str | Path | Loaded], baseline: str | Path | Loaded | None
) -> list[tuple[str, str | Loaded]]:
    """The models in the order of their evaluation, the baseline first: their short names and themselves. Each is once.

    Raises:
        ConfigError: the same model is named twice, a model has the name of a file beside the results, or the baseline
            is the only one: a verdict would be met unasked.
    """
    each = [str(m) if isinstance(m, Path) else m for m in (*models, *([] if baseline is None else [baseline]))]
    first = [] if baseline is None else [each.pop()]
    others = [model for model in each if model not in first]
    if not others:
        raise ConfigError(f"--baseline {baseline}: is the only MODEL, too", "Name another MODEL or another baseline.")
    each, taken = [*first, *others], Path(COMPARISON).stem
    names = short_names([model.name if isinstance(model, Loaded) else model for model in each], (taken,))
    if len(set(names)) < len(names):
        raise ConfigError("the same model is named twice")
    if taken in names:
        raise ConfigError(f"a model cannot be called {taken!r}, which is a file beside the results", "rename it")
    return list(zip(names, each, strict=True))


def _path(model: str | Loaded) -> str | None:
    if isinstance(model, Loaded):
        return None
    return str(Path(model).resolve()) if Path(model).exists() else model


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and torch (CPU and current GPU) after the block."""
    python, array = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, and restore the mode of every single module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _lent(model: Loaded, engine: Engine, team: Team) -> Iterator[Adapter]:
    """The adapter of a model that the caller has in memory. The model is in evaluation mode while it is scored."""
    limits: dict[str, Any] = {"batch_size": engine.batch_size, "max_length": engine.max_length}
    with eval_mode(model.model):
        adapter = HFAdapter(model.model, model.tokenizer, team=team, generation=engine.generation, **limits)
        with contextlib.closing(adapter):
            yield adapter


def _torchrun_team(lockstep: bool, together_on_all: bool) -> Team:
    """The processes that torchrun started, or this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from fcsd.launch.world import join_world

    return Team(join_world().patient(PATIENCE), lockstep, together_on_all)


def _results(
    lm: Adapter,
    tasks: Sequence[LoadedTask | EvalPlusTask],
    text: HeldOut | None,
    limit: int | None,
    accept_unsafe_exec: bool,
) -> Iterator[Result]:
    """The results of one model, each as soon as it is known."""
    for task in tasks:
        if isinstance(task, EvalPlusTask):
            yield evalplus_result(task, lm, limit, accept_unsafe_exec)
        else:
            yield from task_results(task, lm, limit, accept_unsafe_exec)
    if text is not None:
        yield held_out_result(text, lm)


def announcement(
    models: int, tasks: Sequence[LoadedTask | EvalPlusTask], text: HeldOut | None, limit: int | None
) -> str:
    """How many items each model answers, in total and by benchmark."""
    counts: dict[str, tuple[int, str]] = {}
    for task in tasks:
        if isinstance(task, EvalPlusTask):
            counts[task.row.column] = len(spread(len(task.problems), limit)), ""
        else:
            each = asked_of_each(task, limit).values()
            counts[task.benchmark.column] = sum(map(len, each)), f" in {len(each)} tasks" if len(each) > 1 else ""
    parts = [f"{column} {count:,}{where}" for column, (count, where) in counts.items()]
    if text is not None:
        parts.append(f"{HELD_OUT} {len(text.texts):,}")
        counts[HELD_OUT] = len(text.texts), ""
    total = sum(count for count, _ in counts.values())
    cut = "" if limit is None else f", with --limit {limit}"
    return f"{models} model{'s' * (models > 1)}, {total:,} items each{cut}: {', '.join(parts)}"


def summary(result: Result) -> str:
    """A result as one line of text."""
    value, answers = " ± ".join(shown(result)), shown_answers(result)
    told = f"n={result['n']}, {result['seconds']} s" + (f", answers: {answers}" if answers else "")
    return f"{result['model']}  {result['column']}  {result['metric']} {value}  ({told})"
