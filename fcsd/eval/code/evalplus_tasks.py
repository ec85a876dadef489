"""Runs HumanEval+ and MBPP+ with EvalPlus' prompts, sanitizer, base tests and plus tests.

A model with a chat template gets the prompt as a chat; a model without one continues the code. Answers are generated in
batches, as for every other task. ``fcsd.eval.code.judge`` judges the programs. It accepts every root in HumanEval/32,
where EvalPlus 0.3.1 rejects some right answers.
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fcsd.disk import file_sha256, json_sha256
from fcsd.errors import BadInputError
from fcsd.eval.code.judge import TIMEOUT_S, judged, pass_at_1
from fcsd.eval.code.problems import Problem, load_evalplus
from fcsd.eval.engines.interface import Adapter
from fcsd.eval.results import fields_of
from fcsd.eval.statistics import estimate, spread
from fcsd.eval.suite import Benchmark
from fcsd.foreign_errors import reason_of

# EvalPlus' own prompts and limit, from evalplus/codegen.py and evalplus/provider/base.py.
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
RESPONSE = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:"
)
MAX_NEW_TOKENS = 768

# task -> (name of EvalPlus' file, the environment variable with the path of another file)
FILES = {
    "humaneval": ("HumanEvalPlus", "HUMANEVAL_OVERRIDE_PATH"),
    "mbpp": ("MbppPlus", "MBPP_OVERRIDE_PATH"),
}


@dataclass(frozen=True)
class EvalPlusTask:
    """A suite row with EvalPlus' problems. `data_files` maps the name of the file they came from to its sha256."""

    row: Benchmark
    problems: list[Problem]
    data_files: dict[str, str]


def load_evalplus_task(row: Benchmark, mirror: Path | None) -> EvalPlusTask:
    """The problems of ``evalplus/HumanEvalPlus.jsonl`` or ``MbppPlus.jsonl`` (or ``.gz``) in a mirror.

    Without a mirror they come from the files that ``HUMANEVAL_OVERRIDE_PATH`` and ``MBPP_OVERRIDE_PATH`` name, or from
    EvalPlus' cache, which EvalPlus fills from its release page.

    Raises:
        BadInputError: the data is missing, empty or malformed.
    """
    path = _published(row) if mirror is None else _mirrored(row, mirror)
    return EvalPlusTask(row, load_evalplus(path), {path.name: file_sha256(path)})


def _mirrored(row: Benchmark, mirror: Path) -> Path:
    name = f"evalplus/{FILES[row.task][0]}.jsonl"
    for path in (mirror / name, mirror / f"{name}.gz"):
        if path.is_file():
            return path
    raise BadInputError(f"{row.column}: the data mirror has no file {name}")


def _published(row: Benchmark) -> Path:
    from evalplus.data.utils import get_dataset_metadata, make_cache

    name, variable = FILES[row.task]
    if variable in os.environ:
        path = Path(os.environ[variable])
    else:
        url, cached = get_dataset_metadata(name, str(row.version), mini=False)
        path = Path(cached)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # EvalPlus reports its download on stdout
                make_cache(url, cached)
        except OSError as error:
            raise BadInputError(
                f"{row.column}: cannot fetch {url}: {reason_of(error)}",
                f"set {variable} to a copy, or give --data-mirror DIR",
            ) from error
    if not path.is_file():
        raise BadInputError(f"{row.column}: {path} does not exist")
    return path


def evalplus_result(
    task: EvalPlusTask, lm: Adapter, limit: int | None, accept_unsafe_exec: bool = False
) -> dict[str, Any]:
    """Generate answers and judge their programs. ``value`` is EvalPlus' plus score, ``base_value`` its base score.

    ``samples`` has the programs, in the form that EvalPlus reads, each with how it ended on both kinds of tests.

    Raises:
        BadInputError: a prompt is longer than the model's context.
        NonFiniteError: the model returned NaN or infinite logits.
        FcsdError: there is no sandbox, or a program has no verdict.
    """
    from lm_eval.api.instance import Instance

    row, problems = task.row, [task.problems[i] for i in spread(len(task.problems), limit)]
    bare = [problem.prefix.strip() + "\n" for problem in problems]
    chat = row.chat and lm.tokenizer.chat_template is not None
    prompts = [_chat_prompt(prompt, lm) for prompt in bare] if chat else bare
    until = _stops(row.task, chat)
    settings = {"until": until, "max_gen_toks": MAX_NEW_TOKENS, "do_sample": False}
    requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
    lm.take_lengths()  # those of another task
    try:
        answers = [answer.replace("\t", "    ") for answer in lm.generate_until(requests)]
    except BadInputError as error:
        raise BadInputError(f"{row.column}: {error}", error.hint) from error
    texts = answers if chat else [prompt + answer for prompt, answer in zip(bare, answers, strict=True)]
    verdicts, sandbox = lm.team.on_first(lambda: judged(problems, texts, accept_unsafe_exec, form="chat"))
    pass_at_1(verdicts, "plus")  # raises where a verdict is missing
    items = [float(v.plus is not None and v.plus.status == "pass") for v in verdicts]
    value, stderr = estimate(items)
    used = {
        **row.settings,
        "chat": chat,
        "generation": {"until": until, "max_gen_toks": MAX_NEW_TOKENS},
        "limit": limit,
        "program_seconds": TIMEOUT_S,
        "prompts_sha256": json_sha256(prompts),
    }
    return {
        **fields_of(row, items, value, stderr, used),
        "base_value": pass_at_1(verdicts, "base"),
        "data_sha256": json_sha256([*task.data_files.values(), len(problems)]),
        "data_files": task.data_files,
        "answers": lm.take_lengths(),
        "sandbox": sandbox,
        "samples": [
            {
                "task_id": verdict.task_id,
                "solution": text,
                "base": verdict.base.status,
                "plus": verdict.plus and verdict.plus.status,
            }
            for verdict, text in zip(verdicts, texts, strict=True)
        ],
    }


def _chat_prompt(prompt: str, lm: Adapter) -> str:
    """The user's question and the beginning of the answer, which ends where the code begins."""
    from evalplus.provider.utility import make_raw_chat_prompt

    def in_limits(messages: list[dict[str, str]], tokenize: bool) -> str:
        return lm.chat_text(messages)

    limited = SimpleNamespace(chat_template=lm.tokenizer.chat_template, apply_chat_template=in_limits)
    return make_raw_chat_prompt(prompt, INSTRUCTION, RESPONSE, limited)


def _stops(task: str, chat: bool) -> list[str]:
    from evalplus.provider.utility import EOS, extra_eos_for_direct_completion

    return [*EOS, *(["\n```\n"] if chat else extra_eos_for_direct_completion(task))]
