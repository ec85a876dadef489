"""Asks vLLM the questions of the eleven tasks on a machine without lm-eval, and compares its scores item by item.

    python benchmarks/vllm/vllm_items.py record MODEL ITEMS.json.gz [--limit N]    transformers answers, float32, on the
    CPU python benchmarks/vllm/vllm_parity.py items FOLDER CASE --items ITEMS --out ANSWERS   vLLM answers the same
    requests python benchmarks/vllm/vllm_items.py score MODEL ITEMS.json.gz ANSWERS.json.gz what each item scores with
    vLLM's answers

``record`` and ``score`` need fcsd's own environment and the bundled mirror; they run fcsd's tasks. ``record`` writes
every request as token ids, with the answer of transformers, and what each item scored. ``score`` runs the tasks again
with vLLM's answers in place of the model's, and exits with 1 unless every item scores the same.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from fcsd.engine.generate import BATCHES, ending  # noqa: E402
from fcsd.eval.code.evalplus_tasks import EvalPlusTask, evalplus_result  # noqa: E402
from fcsd.eval.code.sandbox import find_sandbox  # noqa: E402
from fcsd.eval.engines.adapter import HFAdapter  # noqa: E402
from fcsd.eval.suite import EVALPLUS, SANDBOX, select_any  # noqa: E402
from fcsd.eval.tasks import load_tasks, task_results  # noqa: E402
from fcsd.models.build import load_model  # noqa: E402

MIRROR = ROOT / "assets" / "mirror"
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


def main() -> None:
    """Run the part that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("record", "score"))
    parser.add_argument("model", type=Path)
    parser.add_argument("items", type=Path)
    parser.add_argument("answers", type=Path, nargs="?")
    parser.add_argument("--limit", type=int, help="questions of each task, for MMLU of each subject")
    parser.add_argument("--tasks", type=lambda text: text.split(","), help="some of the eleven tasks")
    given = parser.parse_args()
    if given.part == "record":
        return record(given.model, given.items, given.limit, given.tasks)
    sys.exit(not score(given.model, given.items, given.answers))


if __name__ == "__main__":
    main()
