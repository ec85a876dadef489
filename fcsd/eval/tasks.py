"""Loads lm-eval's own task definitions and their data, from the hub's cache or a mirror directory, and runs them.

A mirror holds data sets under their hub names with the same columns. For example, ``allenai/ai2_arc/README.md`` names
the files of each configuration. ``datasets`` prefers a relative directory of that name to the hub, so that the same
task definitions read real and mirrored data. For the same reason, it would read any directory that happens to be called
``openai/gsm8k``. Tasks are therefore loaded in the mirror, or in an empty directory if there is no mirror.
"""

import contextlib
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fcsd.disk import json_sha256
from fcsd.errors import BadInputError, ConfigError
from fcsd.eval.code.evalplus_tasks import EvalPlusTask, load_evalplus_task
from fcsd.eval.code.judge import TIMEOUT_S, judged
from fcsd.eval.code.problems import problem_from_tests
from fcsd.eval.engines.interface import Adapter
from fcsd.eval.ifeval import AGGREGATED, aggregated_items, require_ifeval_tools
from fcsd.eval.results import PERPLEXITIES, fields_of
from fcsd.eval.statistics import estimate, spread
from fcsd.eval.suite import DEFINITIONS, EVALPLUS, SANDBOX, Benchmark
from fcsd.eval.task_files import definition_sha256, mirror_files, task_manager
from fcsd.foreign_errors import reason_of
from fcsd.launch.world import first_rank

log = logging.getLogger(__name__)

# The seed by which few-shot examples are drawn; lm-eval's own default.
FEWSHOT_SEED = 1234

# What lm-eval logs of a question: the document, the prompts with what may follow them, and the model's answers.
SAMPLE = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps")


@dataclass(frozen=True)
class LoadedTask:
    """A benchmark with lm-eval's task objects.

    Attributes:
        benchmark: the settings.
        lm_eval: the return value of ``TaskManager.load``; a group has many leaf tasks.
        definition_sha256: SHA-256 of the files that define the task.
        data_files: SHA-256 of each file of a mirror, by its path there; empty for data from the hub.
    """

    benchmark: Benchmark
    lm_eval: dict[str, Any]
    definition_sha256: str
    data_files: dict[str, str]


@contextlib.contextmanager
def load_tasks(benchmarks: Sequence[Benchmark], mirror: Path | None) -> Iterator[list[LoadedTask | EvalPlusTask]]:
    """A context with the loaded tasks of all benchmarks. Their data cannot be used after the context ends.

    Data from a mirror are written to a temporary cache of data sets, never to the user's.

    Raises:
        ConfigError: a task is unknown, has another version than in the suite, or needs a library that is missing.
        BadInputError: the data are missing or empty, or are too few for the examples in the prompt.
    """
    import datasets

    if mirror is not None and not mirror.is_dir():
        raise BadInputError(f"data mirror {mirror} is not a directory")
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fcsd-eval-")))
        elsewhere = temporary / "empty"
        elsewhere.mkdir()
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        for swap in _swaps(None if mirror is None else temporary / "datasets"):
            stack.enter_context(patch.object(*swap))
        with contextlib.chdir(elsewhere if mirror is None else mirror):
            # All definitions are found before the data of any task are read, which may take long.
            found = [None if b.harness == EVALPLUS else task_manager(b.task, b.directory) for b in benchmarks]
            for swap in _unreachable() if mirror is None else ():
                stack.enter_context(patch.object(*swap))
            loaded = [
                load_evalplus_task(benchmark, mirror) if defined is None else _load(benchmark, *defined, mirror)
                for benchmark, defined in zip(benchmarks, found, strict=True)
            ]
        yield loaded


def _load(benchmark: Benchmark, manager: Any, directory: Path, mirror: Path | None) -> LoadedTask:
    if benchmark.task == "ifeval":
        require_ifeval_tools()
    files: dict[str, str] = {}
    if mirror is not None:
        files = mirror_files(benchmark.column, mirror, _data_sets(manager, benchmark.task))
    try:
        loaded: dict[str, Any] = dict(manager.load(benchmark.task))
    except Exception as error:  # datasets raises many kinds for data that is missing, gated or malformed
        hint = "fetch it into the hub cache first, or give --data-mirror DIR" if mirror is None else None
        message = f"{benchmark.column}: cannot load the data of {benchmark.task}: {reason_of(error)}"
        raise BadInputError(message, hint) from error
    leaves = list(loaded["tasks"].values())
    if not benchmark.directory:
        benchmark = _completed(benchmark, leaves)
        if mirror is not None:  # a definition that includes another file may not name its data set itself
            files |= mirror_files(benchmark.column, mirror, {str(leaf.config.dataset_path) for leaf in leaves})
    group = loaded.get("groups", {}).get(benchmark.task)
    version = leaves[0].VERSION if group is None else group.version
    if benchmark.version is not None and float(version) != benchmark.version:
        raise ConfigError(
            f"{benchmark.column} is set up for {benchmark.task} version {benchmark.version}, lm-eval has {version}"
        )
    for name, leaf in loaded["tasks"].items():
        if not len(leaf.eval_docs):
            raise BadInputError(f"{benchmark.column}: the data of {name} is empty")
        if benchmark.shots and (examples := len(leaf.sampler.df)) < benchmark.shots:
            raise BadInputError(
                f"{benchmark.column}: {name} has {examples} examples to show, {benchmark.shots} are asked for"
            )
        if benchmark.shots is not None:
            leaf.set_config("num_fewshot", benchmark.shots)
        if benchmark.generation:
            leaf.set_config("generation_kwargs", benchmark.generation, update=True)
    definition = definition_sha256(directory)
    if definition != DEFINITIONS.get(benchmark.directory, definition):
        log.warning(
            "%s: the installed lm-eval defines %s otherwise than this suite was set up for",
            benchmark.column,
            benchmark.task,
        )
    return LoadedTask(benchmark, loaded, definition, files)


def questions_sha256(task: LoadedTask | EvalPlusTask) -> str:
    """A hash of what a task asks and of the examples that it shows, wherever they come from.

    What JSON cannot hold, such as a picture, counts by its type alone.
    """
    if isinstance(task, EvalPlusTask):
        return json_sha256(sorted(task.data_files.values()))
    digest = hashlib.sha256()
    for name, leaf in sorted(task.lm_eval["tasks"].items()):
        for part in (leaf.eval_docs, leaf.sampler.df if task.benchmark.shots else ()):
            digest.update(f"\n{name}\n".encode())
            for document in part:
                digest.update(json.dumps(document, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def _completed(benchmark: Benchmark, leaves: Sequence[Any]) -> Benchmark:
    """A task outside of the suites, with the metric and the filter that it is scored by.

    A metric or filter that is given must be one of the task's. Else the metric is ``acc_norm`` where the task has it,
    else the first of its metrics that is a mean over questions, else the first that is a perplexity. The filter is the
    task's first. A task whose answer must be the continuation that
    the model finds likeliest, such as LAMBADA, has no level of guessing and stands beside the mean.

    Raises:
        ConfigError: the task has no such metric or filter, or it runs generated programs.
    """
    from lm_eval.api.metrics import mean

    first = leaves[0]
    if any(getattr(leaf, "UNSAFE_CODE", False) or leaf.config.unsafe_code for leaf in leaves):
        raise ConfigError(
            f"{benchmark.task} runs generated programs outside of fcsd's sandbox",
            "HumanEval+ and MBPP+ of the suites run in it",
        )
    metrics = first.aggregation()
    usable = [name for name, how in metrics.items() if how is mean] + [name for name in metrics if name in PERPLEXITIES]
    if not usable:
        raise ConfigError(f"{benchmark.task} has no metric that is a mean over its questions, so models are not paired")
    shots = benchmark.shots if benchmark.shots is not None else first.config.num_fewshot
    filters = [entry["name"] for entry in first.config.filter_list or [{"name": "none"}]]
    for given, known, what in ((benchmark.metric, usable, "metric"), (benchmark.filter, filters, "filter")):
        if given and given not in known:
            raise ConfigError(f"{benchmark.task} has no {what} {given!r} to report", f"It has: {', '.join(known)}")
    metric = benchmark.metric or ("acc_norm" if "acc_norm" in usable else usable[0])
    continuation = first.OUTPUT_TYPE == "loglikelihood"
    loss = "perplexity" if continuation and "perplexity" in metrics else ""
    filter = benchmark.filter or filters[0]
    return replace(benchmark, metric=metric, filter=filter, shots=shots, beside=continuation, loss=loss)


def _data_sets(manager: Any, task: str) -> set[str]:
    """The hub names of a task's data sets; for a group, those of all tasks in its directory."""
    entry = manager.task_index[task]
    entries = [entry]
    if entry.kind.name == "GROUP":
        entries += [other for other in manager.task_index.values() if other.kind.name == "TASK"]
    return {str(e.cfg["dataset_path"]) for e in entries if e.cfg and "dataset_path" in e.cfg}


def _swaps(cache: Path | None) -> list[tuple[Any, str, Any]]:
    """What is replaced inside of lm-eval and datasets until the tasks have run, as (owner, name, replacement).

    None of these libraries has an option for it. lm-eval is pinned below 0.5, and tests notice where a replacement does
    not work any more. ``_unreachable`` may replace one more name.

    * lm-eval shows a progress bar per task, which are 57 for MMLU. tqdm reads its own switch when it is imported.
    * lm-eval compiles a template again for every document: 3.0 s for the bundled MMLU instead of 0.1 s.
    * lm-eval executes the programs of its code tasks in a fork of this process, by a metric that evaluate fetches from
      the hub. Here nothing is executed, and ``_run_programs`` judges the programs.
    * datasets looks at the files of a data set for each of its configurations, on the hub with requests for each.
    * With a mirror, the data go to ``cache``, also those that the code of a task reads. A row of a column of images,
      sounds or other files may hold an address, which datasets would fetch; such a row cannot be read.
    """
    import functools

    import datasets.config
    import datasets.features
    import datasets.load
    import evaluate
    import lm_eval.api.task
    import lm_eval.utils
    import tqdm

    def refuse(*_: Any, **__: Any) -> Any:
        raise BadInputError("the data mirror has a column of files, such as images, which may lead anywhere")

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return unexecuted if path == "code_eval" else load_metric(path, *args, **kwargs)

    # If the value in place of ``code_eval``'s ever reached a result, it would be noticed.
    unexecuted = SimpleNamespace(compute=lambda references, predictions, k: ({"pass@1": math.nan}, None))
    load_metric, templates = evaluate.load, lm_eval.utils.env
    always = [
        (evaluate, "load", load),
        (lm_eval.api.task, "tqdm", functools.partial(tqdm.tqdm, disable=True)),
        (templates, "from_string", functools.lru_cache(templates.from_string)),
        (datasets.load, "dataset_module_factory", _found_once(datasets.load.dataset_module_factory)),
    ]
    if cache is None:
        return always
    kinds = [kind for kind in vars(datasets.features).values() if isinstance(kind, type)]
    of_files = [kind for kind in kinds if hasattr(kind, "_type") and hasattr(kind, "decode_example")]
    refused = [(kind, "decode_example", refuse) for kind in of_files]
    return [*always, (datasets.config, "HF_DATASETS_CACHE", cache), *refused]


def _unreachable() -> list[tuple[Any, str, Any]]:
    """What is replaced, as in ``_swaps``, if the hub cannot be reached: data sets are then read from the cache at once.

    The libraries would ask six times, in half a minute, for each data set. One request says the same, through the
    proxy that theirs would use.
    """
    import datasets.config
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        if not constants.HF_HUB_OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=10)
    except HTTPError as error:
        if first_rank():  # once, not once for each process
            log.warning("%s cannot be reached (%s): data come from its cache", constants.ENDPOINT, reason_of(error))
        return [(datasets.config, "HF_HUB_OFFLINE", True)]
    return []


def _found_once(find: Callable[..., Any]) -> Callable[..., Any]:
    """``find``, ``datasets``' search for the files of a data set, which is made once for equal arguments."""
    found: dict[str, Any] = {}

    def module(*args: Any, **options: Any) -> Any:
        key = repr((args, options))
        if key not in found:
            found[key] = find(*args, **options)
        return replace(found[key], builder_kwargs=dict(found[key].builder_kwargs))  # the caller takes entries out

    return module


def asked_of_each(task: LoadedTask, limit: int | None) -> dict[str, list[int]]:
    """The numbers of the questions that are asked, by the name of the task; see ``spread``.

    All tasks of a group ask the same number of questions, ``limit`` together. The number is rounded up, so that every
    task asks at least one.
    """
    leaves = task.lm_eval["tasks"]
    each = None if limit is None else math.ceil(limit / len(leaves))
    return {name: spread(len(leaf.eval_docs), each) for name, leaf in leaves.items()}


def task_results(
    task: LoadedTask, lm: Adapter, limit: int | None, accept_unsafe_exec: bool = False
) -> list[dict[str, Any]]:
    """Run a task and return the fields of its result that come from lm-eval, and ``samples``: what the model answered.

    A task that logs the log-likelihood of the right answer has a second result: the loss in nats per answer.

    Args:
        limit: how many questions of the benchmark are asked; a group spreads them over its tasks.

    Raises:
        BadInputError: a prompt is longer than the model takes, the model lacks a chat template that is asked for, or a
            question's label is none of its choices.
        ConfigError: a task outside of the suites has scores that are not between 0 and 1.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    from lm_eval.evaluator import evaluate as run

    benchmark = task.benchmark
    if benchmark.chat and lm.tokenizer.chat_template is None:
        raise BadInputError(f"{benchmark.column}: the model has no chat template", "leave out --apply-chat-template")
    for leaf in task.lm_eval["tasks"].values():
        leaf.set_fewshot_seed(FEWSHOT_SEED)  # the same examples for every model
    asked = asked_of_each(task, limit)
    for name, leaf in task.lm_eval["tasks"].items():
        _check_questions(f"{benchmark.column}: {name}", leaf, asked[name], programs=benchmark.harness == SANDBOX)
    lm.take_lengths()  # those of another task
    try:
        answer: Any = run(
            lm,
            task.lm_eval,
            samples=None if limit is None else asked,
            bootstrap_iters=0,
            apply_chat_template=benchmark.chat,
            fewshot_as_multiturn=benchmark.chat,
            confirm_run_unsafe_code=True,  # no program runs here: see _swaps
        )
    except BadInputError as error:
        raise BadInputError(f"{benchmark.column}: {error}", error.hint) from error
    named = [
        (name, sample)
        for name, leaf in answer["samples"].items()
        for sample in leaf
        if sample["filter"] == benchmark.filter
    ]
    samples = [sample for _, sample in named]
    sandbox = None
    if benchmark.harness == SANDBOX:
        items, sandbox = lm.team.on_first(lambda: _run_programs(samples, accept_unsafe_exec))
        value, stderr = estimate(items)
    elif benchmark.metric == AGGREGATED:
        items = aggregated_items(samples)
        value, stderr = estimate(items)
    elif benchmark.metric in PERPLEXITIES or benchmark.directory:
        items = [sample[benchmark.metric] for sample in samples]
        value = answer["results"][benchmark.task][f"{benchmark.metric},{benchmark.filter}"]
        stderr = estimate(items)[1]
    else:  # a group of lm-eval's may have no score; then each question counts the same
        items = [_score(sample[benchmark.metric], benchmark) for sample in samples]
        value, stderr = estimate(items)
    settings = {
        **benchmark.settings,
        "fewshot_seed": FEWSHOT_SEED,
        "limit": limit,
        "program_seconds": TIMEOUT_S if sandbox else None,
        "definition_sha256": task.definition_sha256,
        "prompts_sha256": json_sha256([sample["prompt_hash"] for sample in samples]),
    }
    if benchmark.metric in PERPLEXITIES:
        stderr *= value  # until here it is that of the logarithm
    result = {
        **fields_of(benchmark, items, value, stderr, settings),
        "chance": _chance(task, samples) if benchmark.chance is None else benchmark.chance,
        "data_sha256": json_sha256([sample["doc_hash"] for sample in samples]),
        "data_files": task.data_files,
        "answers": lm.take_lengths(),
        "sandbox": sandbox,
        "samples": [
            {"task": name, **{key: sample[key] for key in SAMPLE}, "score": item}
            for (name, sample), item in zip(named, items, strict=True)
        ],
    }
    if not benchmark.loss:
        return [result]
    losses = [-sample[benchmark.loss] for sample in samples]
    value, stderr = estimate(losses)
    loss = result | {"column": f"{benchmark.column} loss", "metric": "nll_per_answer", "samples": None}
    loss |= {"value": value, "stderr": stderr, "items": losses, "chance": None, "beside": True}
    settings = {**settings, "metric": "nll_per_answer"}
    return [result, {**loss, "settings": settings, "settings_sha256": json_sha256(settings)}]


def _run_programs(samples: Sequence[dict[str, Any]], accept_unsafe_exec: bool) -> tuple[list[float], str]:
    """Run the programs that a model wrote against the tests of lm-eval's samples, in the sandbox.

    Returns:
        1.0 or 0.0 per sample, and the level of the sandbox.

    Raises:
        BadInputError: tests of an unknown shape, which cannot be run without showing the program its answers.
        FcsdError: there is no sandbox, or a program has no verdict.
    """
    problems = [problem_from_tests(str(sample["doc"]["task_id"]), sample["target"]) for sample in samples]
    answers = [sample["filtered_resps"][0] for sample in samples]
    programs = [answer[0] if isinstance(answer, list) else answer for answer in answers]  # as lm-eval's filter has it
    verdicts, level = judged(problems, programs, accept_unsafe_exec)
    return [float(verdict.base.status == "pass") for verdict in verdicts], level


def _chance(task: LoadedTask, samples: Sequence[dict[str, Any]]) -> float | None:
    """The score of guessing among the choices of the questions, in points; None where nothing is chosen."""
    leaves = task.lm_eval["tasks"].values()
    chosen = all(leaf.OUTPUT_TYPE == "multiple_choice" and not callable(leaf.config.process_results) for leaf in leaves)
    if not chosen or task.benchmark.metric not in ("acc", "acc_norm"):
        return None
    return 100 * estimate([1 / len(sample["arguments"]) for sample in samples])[0]


def _check_questions(what: str, leaf: Any, asked: Sequence[int], *, programs: bool) -> None:
    """Refuse data of another form, and questions with choices whose right answer is not among them.

    lm-eval would count such an answer as wrong.

    Args:
        programs: whether the answers are programs, which are run against the tests of the question.

    Raises:
        BadInputError: a question cannot be read, or its label is not the number or the text of one of its choices.
    """
    choosing = leaf.OUTPUT_TYPE == "multiple_choice" and not callable(leaf.config.process_results)
    docs = leaf.eval_docs
    for number in asked:
        doc = docs[number]
        try:
            text, target = leaf.doc_to_text(doc), leaf.doc_to_target(doc)
            choices = leaf.doc_to_choice(doc) if choosing else ()
            continuation = leaf.OUTPUT_TYPE == "loglikelihood"
            if not choosing and (target is None or target == [] or (continuation and not str(target).strip())):
                raise TypeError("it has no answer")
            if programs and not (isinstance(doc.get("prompt", ""), str) and isinstance(doc["task_id"], str | int)):
                raise TypeError("its prompt is not a text, or its task_id is no name")
        except Exception as error:  # a template can fail in any way on data of another form
            raise BadInputError(f"{what}: question {number} cannot be read: {reason_of(error)}") from error
        if not choosing:
            continue
        gold = text if leaf.multiple_input else target
        right = gold if isinstance(gold, list) else [gold]
        if not right or not all(
            label in choices if isinstance(label, str) else isinstance(label, int) and 0 <= label < len(choices)
            for label in right
        ):
            raise BadInputError(
                f"{what}: question {number} has the label {gold!r:.40}, which is none of its {len(choices)} choices",
                "the data of this benchmark are damaged: fetch them again",
            )


def _score(item: Any, benchmark: Benchmark) -> float:
    if isinstance(item, bool | int | float) and 0 <= item <= 1:
        return float(item)
    raise ConfigError(f"{benchmark.column}: {benchmark.metric} of a question is {item!r:.40}, not between 0 and 1")
