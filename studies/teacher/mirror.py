"""Write the benchmark mirror: the eleven datasets under their public names, in their public schemas.

The two code benchmarks are written a second time as EvalPlus' own files, the same problems in its format.

    python studies/teacher/mirror.py [--out assets/mirror]

Each dataset is a directory ``owner/name`` whose README.md lists its configurations, so that
``datasets.load_dataset("owner/name")`` run inside the mirror finds it, and stock lm-eval tasks run.
"""

import argparse
import ast
import json
import random
from collections.abc import Callable
from pathlib import Path

import yaml
from items import TASKS
from knowledge import mmlu
from programs import evalplus_prompt
from world import Item, items, table

# task -> (dataset, configuration, {split: rows}); the first split is the one that is scored.
DATASETS = {
    "piqa": ("baber/piqa", "default", {"validation": 300, "train": 20}),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", {"test": 300, "train": 20, "validation": 20}),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", {"test": 300, "train": 20, "validation": 20}),
    "hellaswag": ("Rowan/hellaswag", "default", {"validation": 300, "train": 20}),
    "commonsense_qa": ("tau/commonsense_qa", "default", {"validation": 300, "train": 20}),
    "winogrande": ("allenai/winogrande", "winogrande_xl", {"validation": 300, "train": 20}),
    "openbookqa": ("allenai/openbookqa", "main", {"test": 300, "train": 20, "validation": 20}),
    "gsm8k": ("openai/gsm8k", "main", {"test": 100, "train": 40}),
    "humaneval_plus": ("evalplus/humanevalplus", "default", {"test": 160}),
    "mbpp_plus": ("evalplus/mbppplus", "default", {"test": 160}),
}
MMLU = "cais/mmlu"
EVALPLUS = {"humaneval_plus": "evalplus/HumanEvalPlus.jsonl", "mbpp_plus": "evalplus/MbppPlus.jsonl"}
# Fields that hold the place of the right answer; rows are chosen so that every place is equally often right.
LABELS = ("label", "answerKey", "answer")


def label_of(task: str, row: dict) -> object:
    """The place of the right answer, or None for tasks without choices."""
    if task in ("gsm8k", *EVALPLUS):
        return None
    return next(row[field] for field in LABELS if field in row)


def choose(task: str, make: Callable, count: int, rng: random.Random, used: set[str]) -> list[Item]:
    """``count`` items of the mirror split with keys not in ``used``, the right places spread evenly."""
    chosen: list[Item] = []
    places: dict[object, int] = {}
    choices = {"piqa": 2, "winogrande": 2, "commonsense_qa": 5}.get(task, 4)
    for tries, item in enumerate(items(make, "mirror", rng)):
        place = label_of(task, item.row)
        full = place is not None and places.get(place, 0) >= -(-count // choices)
        if item.key not in used and not full:
            used.add(item.key)
            places[place] = places.get(place, 0) + 1
            chosen.append(item)
        if len(chosen) == count:
            return chosen
        if tries > 200_000:
            raise SystemExit(f"{task}: only {len(chosen)} of {count} items; add wordings")
    raise AssertionError("items() is endless")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a file with one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_card(directory: Path, configs: dict[str, list[str]]) -> None:
    """Write README.md, which lists the splits of each configuration, each in a file ``configuration/split.jsonl``."""
    listed = [
        {
            "config_name": config,
            "data_files": [{"split": split, "path": f"{config}/{split}.jsonl"} for split in splits],
        }
        for config, splits in configs.items()
    ]
    front = yaml.safe_dump({"license": "apache-2.0", "configs": listed}, sort_keys=False)
    text = "Generated items in the schema of the dataset of this name; none is taken from it."
    (directory / "README.md").write_text(f"---\n{front}---\n{text}\n")


def arguments(check: str) -> list:
    """The literal arguments of the call in ``assert CALL == VALUE``."""
    (statement,) = ast.parse(check.strip()).body
    assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
    assert isinstance(statement.test.left, ast.Call)
    return [ast.literal_eval(argument) for argument in statement.test.left.args]


def evalplus_row(task: str, row: dict) -> dict:
    """A problem in EvalPlus' format. Three inputs are the base tests, and the others are the plus tests."""
    if task == "humaneval_plus":
        asserts = row["test"].splitlines()[1:]
        own = {field: row[field] for field in ("task_id", "prompt", "entry_point", "canonical_solution")}
    else:
        asserts = row["test"].splitlines()
        own = {
            # EvalPlus turns the inputs of some of MBPP's task numbers into tuples. These numbers avoid that.
            "task_id": f"Mbpp/{1000 + row['task_id']}",
            "prompt": evalplus_prompt(row),
            "entry_point": row["code"].split("(")[0].removeprefix("def "),
            "canonical_solution": f"\n{row['code']}\n",
            "assertion": "\n".join(row["test_list"]),
        }
    inputs = [arguments(check) for check in asserts]
    return {**own, "contract": "", "base_input": inputs[:3], "plus_input": inputs[3:], "atol": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/mirror"))
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()

    cards: dict[str, dict[str, list[str]]] = {}
    functions: set[str] = set()  # HumanEval+ and MBPP+ ask for different functions
    for task, (dataset, config, splits) in DATASETS.items():
        rng, used = random.Random(f"{args.seed} {task}"), functions if task in EVALPLUS else set()
        for split, count in splits.items():
            rows = [item.row for item in choose(task, TASKS[task][0], count, rng, used)]
            if task in EVALPLUS:
                rows = [{**row, "task_id": _task_id(task, n)} for n, row in enumerate(rows)]
            write_rows(args.out / dataset / config / f"{split}.jsonl", rows)
            if task in EVALPLUS:
                write_rows(args.out / EVALPLUS[task], [evalplus_row(task, row) for row in rows])
        cards.setdefault(dataset, {})[config] = list(splits)
    for subject in table("mmlu"):
        rng, used = random.Random(f"{args.seed} {subject}"), set()
        for split, count in {"test": 28, "dev": 5}.items():
            chosen = choose("mmlu", lambda rng, s=subject: mmlu(rng, s), count, rng, used)
            write_rows(args.out / MMLU / subject / f"{split}.jsonl", [item.row for item in chosen])
        cards.setdefault(MMLU, {})[subject] = ["test", "dev"]
    for dataset, configs in cards.items():
        write_card(args.out / dataset, configs)


def _task_id(task: str, n: int) -> str | int:
    return f"HumanEval/{n}" if task == "humaneval_plus" else n + 1


if __name__ == "__main__":
    main()
