"""Load stock lm-eval task definitions and their data: from the hub's cache, or from a mirror directory.

A mirror holds data sets under their hub names with the same columns, ``allenai/ai2_arc/README.md`` naming the
files of each configuration. ``datasets`` prefers such a relative directory to the hub, so that real and mirrored
data take the same path through the same task definitions. It also means that a directory that merely happens
to be called ``openai/gsm8k`` would be taken for the data, hence the change of directory in both cases.
"""

import contextlib
import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fcsd.disk import file_sha256, json_sha256
from fcsd.errors import BadInputError, ConfigError
from fcsd.eval.code_tasks import TIMEOUT_S, no_execution, run_programs
from fcsd.eval.engines.interface import Adapter
from fcsd.eval.evalplus_tasks import EvalPlusTask, load_evalplus_task
from fcsd.eval.results import PERPLEXITIES
from fcsd.eval.statistics import estimate
from fcsd.eval.suite import DEFINITIONS, EVALPLUS, SANDBOX, Benchmark

log = logging.getLogger(__name__)

# Few-shot examples are drawn with this seed, lm-eval's own default.
FEWSHOT_SEED = 1234


@dataclass(frozen=True)
class LoadedTask:
    """A suite row with lm-eval's task objects behind it.

    Attributes:
        row: the settings.
        lm_eval: what ``TaskManager.load`` returned; a group holds many leaf tasks.
        definition_sha256: hash of the files that define the task.
        data_files: sha256 of each file of a mirror by its path there; empty for hub data.
    """

    row: Benchmark
    lm_eval: dict[str, Any]
    definition_sha256: str
    data_files: dict[str, str]


@contextlib.contextmanager
def load_tasks(rows: Sequence[Benchmark], mirror: Path | None) -> Iterator[list[LoadedTask | EvalPlusTask]]:
    """The tasks of all rows; their data live until the context ends.

    Nothing read from a mirror reaches the user's dataset cache: it goes to a temporary one.

    Raises:
        ConfigError: a task version other than the row's, or what the task needs is not installed.
        BadInputError: data missing, empty or too few to show examples.
    """
    import datasets.config

    if mirror is not None and not mirror.is_dir():
        raise BadInputError(f"data mirror {mirror} is not a directory")
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fcsd-eval-")))
        elsewhere = temporary / "empty"
        elsewhere.mkdir()
        if mirror is not None:
            stack.enter_context(_swapped(datasets.config, "HF_DATASETS_CACHE", temporary / "datasets"))
        stack.enter_context(_lean_lm_eval())
        with contextlib.chdir(elsewhere if mirror is None else mirror), no_execution():
            loaded = [(load_evalplus_task if row.harness == EVALPLUS else _load)(row, mirror) for row in rows]
        yield loaded


def _load(row: Benchmark, mirror: Path | None) -> LoadedTask:
    import lm_eval.tasks

    if row.task == "ifeval":
        _require_ifeval_tools()
    directory = Path(lm_eval.tasks.__file__).parent / row.directory
    # Only this directory: scanning all of lm-eval's 14 000 task files takes ten seconds.
    manager = lm_eval.tasks.TaskManager(include_path=directory, include_defaults=False)
    entry = manager.task_index.get(row.task)
    if entry is None:
        raise ConfigError(f"the installed lm-eval has no task {row.task!r} in tasks/{row.directory}")
    files: dict[str, str] = {}
    if mirror is not None:
        configs = [
            entry.cfg or {},
            *((e.cfg or {}) for e in manager.task_index.values() if _is_leaf_of(e, entry)),
        ]
        files = _mirror_files(row, mirror, {str(c["dataset_path"]) for c in configs if "dataset_path" in c})
    try:
        loaded: dict[str, Any] = dict(manager.load(row.task))
    except Exception as error:  # datasets raises many kinds for data that is missing, gated or malformed
        hint = "fetch it into the hub cache first, or give --data-mirror DIR" if mirror is None else None
        raise BadInputError(f"{row.column}: cannot load the data of {row.task}: {_line(error)}", hint) from error
    group = loaded.get("groups", {}).get(row.task)
    version = next(iter(loaded["tasks"].values())).VERSION if group is None else group.version
    if row.version is not None and float(version) != row.version:
        raise ConfigError(f"{row.column} is set up for {row.task} version {row.version}, lm-eval has {version}")
    for name, task in loaded["tasks"].items():
        if not len(task.eval_docs):
            raise BadInputError(f"{row.column}: the data of {name} is empty")
        if row.shots and (examples := len(task.sampler.df)) < row.shots:
            raise BadInputError(f"{row.column}: {name} has {examples} examples to show, {row.shots} are asked for")
        task.set_config("num_fewshot", row.shots)
        if row.generation:
            task.set_config("generation_kwargs", row.generation, update=True)
    definition = _tree_sha256(directory)
    if definition != DEFINITIONS[row.directory]:
        log.warning(f"{row.column}: the installed lm-eval defines {row.task} otherwise than this suite was set up for")
    return LoadedTask(row, loaded, definition, files)


def _require_ifeval_tools() -> None:
    """lm-eval looks for them while it is imported, and would go to the network, or fail once all answers are there.

    Raises:
        ConfigError: what to install.
    """
    if missing := [name for name in ("immutabledict", "langdetect", "nltk") if find_spec(name) is None]:
        raise ConfigError(f"IFEval needs {', '.join(missing)}", "pip install 'fcsd[ifeval]'")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(
            "IFEval counts sentences by NLTK's punkt_tab, which is not here",
            "python -m nltk.downloader punkt_tab; offline, copy tokenizers/punkt_tab into a directory of NLTK_DATA",
        ) from None


def _is_leaf_of(entry: Any, group: Any) -> bool:
    """Whether ``entry`` is a task that a group's mirror must supply (all tasks in mmlu's directory are)."""
    return group.kind.name == "GROUP" and entry.kind.name == "TASK"


def _mirror_files(row: Benchmark, mirror: Path, names: set[str]) -> dict[str, str]:
    """sha256 of every file of the data sets; missing ones must never be looked for on the hub instead."""
    files = {}
    for name in sorted(names):
        root = mirror / name
        if not root.is_dir():
            raise BadInputError(f"{row.column}: the data mirror has no directory {name}")
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            files[path.relative_to(mirror).as_posix()] = file_sha256(path)
    return files


def _tree_sha256(directory: Path) -> str:
    """One hash over the YAML and Python files that define a task and its siblings."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".yaml", ".py") or path.name.endswith("_yaml"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _lean_lm_eval() -> Iterator[None]:
    """lm-eval without a progress bar per task (57 for MMLU) and without compiling a template per document."""
    import functools

    import datasets
    import lm_eval.api.task
    import lm_eval.utils
    import tqdm

    templates = lm_eval.utils.env
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with (
            _swapped(lm_eval.api.task, "tqdm", functools.partial(tqdm.tqdm, disable=True)),
            _swapped(templates, "from_string", functools.lru_cache(templates.from_string)),
        ):
            yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def task_result(task: LoadedTask, lm: Adapter, limit: int | None, accept_unsafe_exec: bool = False) -> dict[str, Any]:
    """Run a task and keep what the result row needs of lm-eval's answer.

    Raises:
        BadInputError: a prompt longer than the model takes.
        NonFiniteError: NaN or infinite logits.
    """
    from lm_eval.evaluator import evaluate as run

    row = task.row
    for leaf in task.lm_eval["tasks"].values():
        leaf.set_fewshot_seed(FEWSHOT_SEED)  # the same examples for every model
    try:
        answer: Any = run(
            lm,
            task.lm_eval,
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=row.chat,
            fewshot_as_multiturn=row.chat,
            confirm_run_unsafe_code=True,  # it runs none: see code_tasks
        )
    except BadInputError as error:
        raise BadInputError(f"{row.column}: {error}", error.hint) from error
    samples = [s for leaf in answer["samples"].values() for s in leaf if s["filter"] == row.filter]
    sandbox = None
    if row.harness == SANDBOX:
        items, sandbox = lm.team.on_first(lambda: run_programs(samples, accept_unsafe_exec))
        value, stderr = estimate(items)
    else:
        items = [sample[row.metric] for sample in samples]
        value, stderr = answer["results"][row.task][f"{row.metric},{row.filter}"], estimate(items)[1]
    settings = {
        "harness": row.harness,
        "task": row.task,
        "version": row.version,
        "shots": row.shots,
        "fewshot_seed": FEWSHOT_SEED,
        "metric": row.metric,
        "filter": row.filter,
        "chat": row.chat,
        "generation": row.generation,
        "limit": limit,
        "program_seconds": TIMEOUT_S if sandbox else None,
        "definition_sha256": task.definition_sha256,
        "prompts_sha256": json_sha256([sample["prompt_hash"] for sample in samples]),
    }
    return {
        "column": row.column,
        "task": row.task,
        "metric": row.metric,
        "filter": row.filter,
        "value": value,
        "stderr": stderr * value if row.metric in PERPLEXITIES else stderr,
        "n": len(items),
        "chance": row.chance,
        "items": items,
        "settings": settings,
        "settings_sha256": json_sha256(settings),
        "data_sha256": json_sha256([sample["doc_hash"] for sample in samples]),
        "data_files": task.data_files,
        "sandbox": sandbox,
    }
