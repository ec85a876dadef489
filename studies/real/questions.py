"""The benchmarks as token ids, for machines without lm-eval: records the questions of tasks, and asks a model them.

    python -m studies.real questions MODEL MIRROR FILE.json.gz [--tasks NAMES] [--limit N]

A question has the ids of its context and of each ending, the characters of the endings, and the number of the right
one. ``answers`` scores them as lm-eval's ``acc_norm``: the ending with the largest log-probability of a character.
"""

import argparse
import gzip
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fcsd.engine.logprobs import continuation_logprobs
from fcsd.eval.statistics import paired_difference, spread

TASKS = "piqa,arc_easy,hellaswag,openbookqa"
Questions = dict[str, list[dict[str, Any]]]


ARGUMENTS = {
    "model": Path,
    "mirror": Path,
    "file": Path,
    "--tasks": TASKS,
    "--limit": dict(type=int, default=2500, help="questions of a task, spread over it"),
}


def main(given: argparse.Namespace) -> None:
    """Record the questions of one model's tokenizer."""
    found = record(given.model, given.mirror.absolute(), given.tasks.split(","), given.limit)
    with gzip.open(given.file, "wt") as file:
        json.dump(found, file)
    print(", ".join(f"{name}: {len(rows)}" for name, rows in found.items()))


def read(file: Path) -> Questions:
    """The questions of a file, by the column of their task."""
    with gzip.open(file, "rt") as source:
        return json.load(source)


def record(model: Path, mirror: Path, tasks: list[str], limit: int | None) -> Questions:
    """The questions of some tasks of suite ``paper`` that have one right ending, as ``fcsd eval --limit`` asks them."""
    from fcsd.checkpoint.tokenizer import load_tokenizer
    from fcsd.eval.engines.adapter import HFAdapter
    from fcsd.eval.suite import select_any
    from fcsd.eval.tasks import LoadedTask, load_tasks
    from fcsd.models.build import load_model

    class Ids(HFAdapter):
        """Gives the token ids of requests in place of their log-probabilities."""

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
            return [(context, ids) for _, context, ids in requests]

    adapter = Ids(load_model(model, dtype=torch.float32).eval(), load_tokenizer(model))
    found: Questions = {}
    with load_tasks(select_any("paper", tasks), mirror) as loaded:
        for task in loaded:
            assert isinstance(task, LoadedTask)  # none of these is one of evalplus
            (leaf,) = task.lm_eval["tasks"].values()
            rows = []
            for number in spread(len(leaf.eval_docs), limit):
                document = leaf.eval_docs[number]
                context, endings = leaf.doc_to_text(document), leaf.doc_to_choice(document)
                texts = [(context, leaf.config.target_delimiter + ending) for ending in endings]
                ids: list[Any] = adapter.loglikelihood([SimpleNamespace(args=text) for text in texts])
                row = {"requests": ids, "lengths": [*map(len, endings)], "right": int(leaf.doc_to_target(document))}
                rows.append(row)
            found[task.benchmark.column] = rows
    return found


def answers(model: Any, questions: Questions) -> dict[str, dict[str, list[float]]]:
    """For each question of a task ``right``, 1 for a right answer, and ``loss``, -log of the right ending's share."""
    rows = [row for task in questions.values() for row in task]
    requests = [tuple(request) for row in rows for request in row["requests"]]
    with torch.no_grad():
        logprobs = continuation_logprobs(model, requests)
    told, place = iter(range(len(requests))), {}
    for row in rows:
        place[id(row)] = [logprobs[next(told)][0] for _ in row["requests"]]
    found = {}
    for name, task in questions.items():
        right, loss = [], []
        for row in task:
            values = torch.tensor(place[id(row)], dtype=torch.float64)
            of_a_character = values / torch.tensor(row["lengths"], dtype=torch.float64)
            right.append(float(of_a_character.argmax() == row["right"]))
            loss.append(-float(values.log_softmax(0)[row["right"]]))
        found[name] = {"right": right, "loss": loss}
    return found


def right_shares(told: list[dict[str, Any]], step: int = 1) -> dict[str, list[float]]:
    """For each task, the share of runs that answer each question right, or every ``step``-th question.

    Args:
        told: what ``answers`` gave for each run.
    """
    return {
        task: [statistics.mean(of) for of in zip(*(one[task]["right"][::step] for one in told), strict=True)]
        for task in told[0]
    }


def gap(items: dict[str, list[float]], others: dict[str, list[float]]) -> str:
    """The mean over the tasks of the difference, in points, with its standard error, paired over the questions."""
    gaps = [paired_difference(items[task], others[task]) for task in items]
    value = statistics.mean(gap for gap, _ in gaps)
    error = math.sqrt(sum(error**2 for _, error in gaps)) / len(gaps)
    return f"{100 * value:+.2f} ± {100 * error:.2f}"


def points(items: dict[str, list[float]]) -> float:
    """The mean over the tasks of the share of right answers, in percent."""
    return 100 * statistics.mean(map(statistics.mean, items.values()))
