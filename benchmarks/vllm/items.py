"""Asks vLLM the questions of the eleven tasks on a machine without lm-eval, and compares its scores item by item.

    python -m benchmarks.vllm items record MODEL ITEMS.json.gz [--limit N]            # transformers, float32, a CPU
    python -m benchmarks.vllm parity items FOLDER CASE --items ITEMS --out ANSWERS    # vLLM
    python -m benchmarks.vllm items score MODEL ITEMS.json.gz ANSWERS.json.gz         # each item by vLLM's answers

``record`` and ``score`` need fcsd's own environment and the bundled mirror; they run fcsd's tasks. ``record`` writes
every request as token ids, with the answer of transformers, and what each item scored. ``score`` runs the tasks again
with vLLM's answers in place of the model's, and exits with 1 unless every item scores the same.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from fcsd.engine.generate import BATCHES, ending
from fcsd.eval.code.evalplus_tasks import EvalPlusTask, evalplus_result
from fcsd.eval.code.sandbox import find_sandbox
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.suite import EVALPLUS, SANDBOX, select_any
from fcsd.eval.tasks import load_tasks, task_results
from fcsd.models.build import load_model

ARGUMENTS = {
    "part": dict(choices=("record", "score")),
    "model": Path,
    "items": Path,
    "answers": dict(type=Path, nargs="?"),
    "--limit": dict(type=int, help="questions of each task, for MMLU of each subject"),
    "--tasks": dict(type=lambda text: text.split(","), help="some of the eleven tasks"),
}
MIRROR = Path(__file__).parents[2] / "assets" / "mirror"
Answer = dict[str, Any]


class Recorder(HFAdapter):
    """Keeps every request and transformers' answer to it in ``requests``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.requests: list[Answer] = []

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        answers = super()._loglikelihood_tokens(requests, **kwargs)
        for (_, context, continuation), (logprob, greedy) in zip(requests, answers, strict=True):
            self.requests.append(dict(context=context, continuation=continuation, logprob=logprob, greedy=greedy))
        return answers

    def _generate(
        self, prompts: list[list[int]], stops: tuple[str, ...], max_new_tokens: int
    ) -> Iterator[tuple[int, str, tuple[int, bool] | None]]:
        ends = sorted(ending(self.model, self.tokenizer, stops).tokens)
        for index, text, length in super()._generate(prompts, stops, max_new_tokens):
            self.requests.append(dict(prompt=prompts[index], ends=ends, stops=stops, new=max_new_tokens, text=text))
            yield index, text, length


class Replayer(HFAdapter):
    """Gives stored answers. A request that has none is an error."""

    def __init__(self, answers: list[Answer], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.answers = {key_of(answer): answer for answer in answers}

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        found = [self.answers[key_of(dict(context=c, continuation=ids))] for _, c, ids in requests]
        return [(answer["logprob"], answer["greedy"]) for answer in found]

    def _generate(
        self, prompts: list[list[int]], stops: tuple[str, ...], max_new_tokens: int
    ) -> Iterator[tuple[int, str, tuple[int, bool] | None]]:
        for index, prompt in enumerate(prompts):  # how long the answers are was not written down
            yield index, self.answers[key_of(dict(prompt=prompt, stops=stops, new=max_new_tokens))]["text"], None


def key_of(request: Answer) -> str:
    """What identifies a request."""
    names = ("context", "continuation", "prompt", "stops", "new")
    return json.dumps([request.get(name) for name in names])


def run_tasks(adapter: HFAdapter, limit: int | None, tasks: list[str] | None, mirror: Path) -> dict[str, list[float]]:
    """The score of every item, by task of suite ``paper``."""
    chosen = select_any("paper", tasks)
    if any(benchmark.harness in (SANDBOX, EVALPLUS) for benchmark in chosen):  # refused before minutes of work
        find_sandbox(accept_unsafe_exec=False)
    items = {}
    with load_tasks(chosen, mirror) as loaded:
        for task in loaded:
            result = (
                evalplus_result(task, adapter, limit)
                if isinstance(task, EvalPlusTask)
                else task_results(task, adapter, limit)[0]
            )
            items[result["column"]] = [float(item) for item in result["items"]]
            print(f"{result['column']}: {result['value']:.3f} of {result['n']}", flush=True)
    return items


def opened(path: Path) -> tuple[Any, Any]:
    """The model in float32 on the CPU, and its tokenizer."""
    return load_model(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def record(path: Path, file: Path, limit: int | None, tasks: list[str] | None, mirror: Path = MIRROR) -> None:
    """Write the requests, the answers of transformers, and the scores of the items."""
    recorder = Recorder(*opened(path), generation=BATCHES)
    items = run_tasks(recorder, limit, tasks, mirror)
    with gzip.open(file, "wt") as target:
        json.dump(dict(limit=limit, tasks=tasks, items=items, requests=recorder.requests), target)
    print(f"{file}: {len(recorder.requests)} requests, {file.stat().st_size / 2**20:.2f} MiB")


def score(path: Path, file: Path, answers_file: Path, mirror: Path = MIRROR) -> bool:
    """Print, for each task, how many items score as with transformers. Returns whether all of them do."""
    with gzip.open(file, "rt") as source, gzip.open(answers_file, "rt") as given:
        recorded, answers = json.load(source), json.load(given)
    requests = [{**request, **answer} for request, answer in zip(recorded["requests"], answers, strict=True)]
    replayer = Replayer(requests, *opened(path), generation=BATCHES)
    found = run_tasks(replayer, recorded["limit"], recorded["tasks"], mirror)
    equal = True
    for column, before in recorded["items"].items():
        same = sum(a == b for a, b in zip(before, found[column], strict=True))
        equal &= same == len(before)
        print(f"{column}: {same} of {len(before)} items equal")
    return equal


def main(given: Any) -> bool | None:
    """Run the part that the arguments name; whether an item scores otherwise."""
    if given.part == "record":
        return record(given.model, given.items, given.limit, given.tasks)
    return not score(given.model, given.items, given.answers)
