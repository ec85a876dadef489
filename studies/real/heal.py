"""Heals conversions of one real model by several recipes, some runs at a time, and measures what came back.

    python -m studies.real heal TEACHER OUT --cases FILE --text own=DIR [--text foreign=DIR] [--mirror DIR]
        [--gpus N] [--at-once N] [--tasks NAMES] [--held-out FILE]

A case is a line of JSON. It has a `name`, what `fcsd convert` takes (`wiring`, with a variant behind a space, `layers`,
and `tp_degree` under Desync), the `text` (a name, or two
with `+`), the `tokens` and the learning rate `lr`. It may have a `seed`, the tokens of a step (`batch`), and in `set`
every other value of the recipe by its dotted key, such as `objective.temperature`, `optim.betas` or `optim.train`
(`["converted"]` trains the converted layers alone). `untrained` measures the conversion before it is healed as well.
`eval` asks for the benchmarks, for the last words of passages if the mirror has them (`passages` writes
them), and for the loss on `--held-out`. `from` names another model than TEACHER that is converted and healed to
TEACHER: an earlier case, whose healed model is meant, or a directory in OUT. With the wiring `standard` nothing is
converted. `gpus` divides a run over the first of the GPUs that `CUDA_VISIBLE_DEVICES` names. All cases are checked
before the first one runs.

A directory of text holds `train` and `held_out` with parquet files of token ids, as `fcsd write` leaves them. Each GPU
runs `--at-once` cases at a time; the rates of such runs are no rates of a run that has the GPU to itself.
`OUT/results.jsonl` receives a line for each case that has ended; one that asks benchmarks has a line before them, too,
which says so in `failed`. The same command runs the cases that have not ended, and those that failed, and a killed run
goes on from its last checkpoint. The checkpoints of a healed model are removed; it stays in `OUT/NAME/run/final`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.programs import TEXTS
from studies.real.passages import DATA_SET
from studies.real.runner import SEQ, measure, store, stored

from fcsd.checkpoint import fingerprint, read_layout
from fcsd.config import Recipe
from fcsd.eval.results import COMPARISON

TASKS = "piqa,arc_easy,arc_challenge,hellaswag,openbookqa,winogrande,commonsense_qa"
BATCH, MICRO = 131072, 32
NEEDED = {"name", "wiring", "layers", "text", "tokens", "lr"}
POSSIBLE = {"seed", "batch", "set", "untrained", "eval", "from", "gpus", "tp_degree"}


ARGUMENTS = {
    "teacher": Path,
    "out": Path,
    "--cases": dict(type=Path, required=True),
    "--text": TEXTS,
    "--mirror": Path,
    "--gpus": 1,
    "--at-once": dict(type=int, default=1, help="runs at a time on each GPU"),
    "--limit": 1000,
    "--tasks": dict(default=TASKS, help="the benchmarks that `eval` asks for"),
    "--held-out": dict(type=Path, help="a text on which `eval` measures the loss"),
    "--measure": dict(
        type=Path, nargs="+", metavar="STUDENT", help="print a line with the divergences of each, and stop"
    ),
}


def main(given: argparse.Namespace) -> None:
    """Run the cases that have no result yet."""
    texts = dict(given.text)
    if given.measure:
        for student in given.measure:
            print(json.dumps(measure(student, given.teacher, texts)), flush=True)
        return
    cases = read_cases(given.cases, texts)
    names = gpu_names(max([given.gpus, *(case.get("gpus", 1) for case in cases)]))
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    ended = {line["name"] for line in stored(results) if "failed" not in line}
    places: SimpleQueue[int] = SimpleQueue()
    for number in range(given.gpus * given.at_once):
        places.put(number)

    def run(case: dict[str, Any]) -> None:
        number = places.get()
        # Two runs of one GPU must not meet at one port. On a CPU the name of the GPU means nothing.
        port = int(os.environ.get("MASTER_PORT", "29600")) + number
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": names[number % given.gpus], "MASTER_PORT": str(port)}
        env.setdefault("OMP_NUM_THREADS", "4")
        try:
            found = heal(case, given.teacher, given.out, texts, env)
            if case.get("eval") and given.mirror is not None:
                store(results, {**found, "failed": "the benchmarks have not ended"})
                found |= scores(case, given, env)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            log = given.out / case["name"] / "log.txt"
            found = {**case, "failed": f"{error}"[-500:], "log": log.read_text()[-500:] if log.exists() else ""}
        places.put(number)
        store(results, found)
        what = found.get("failed") or ", ".join(f"KL {kl['kl']:.4f} on {text}" for text, kl in found["kl"].items())
        print(f"{case['name']}: {what}", flush=True)

    with ThreadPoolExecutor(given.gpus * given.at_once) as pool:
        list(pool.map(run, (case for case in cases if case["name"] not in ended)))


def read_cases(file: Path, texts: dict[str, Path]) -> list[dict[str, Any]]:
    """The cases of a file, whose recipes are checked.

    Raises:
        ValueError: a line is no case, has a key that means nothing, or two cases have one name.
    """
    if not (cases := stored(file)):
        raise ValueError(f"{file}: there are no cases")
    for case in cases:
        if wrong := (case.keys() - NEEDED - POSSIBLE) | (NEEDED - case.keys()):
            raise ValueError(f"case {case.get('name')}: {', '.join(sorted(wrong))} missing or unknown")
        Recipe.model_validate(recipe_of(case, Path(), Path(), texts))
    if len({case["name"] for case in cases}) < len(cases):
        raise ValueError(f"{file}: two cases have one name")
    return cases


def gpu_names(gpus: int) -> list[str]:
    """The names of the first GPUs that this process may use; ``CUDA_VISIBLE_DEVICES`` says which these are.

    Raises:
        ValueError: it names fewer.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(gpus)]
    if len(names) < gpus:
        raise ValueError(f"{gpus} GPUs are wanted, and CUDA_VISIBLE_DEVICES={seen} names {len(names)}")
    return names[:gpus]


def heal(case: dict[str, Any], teacher: Path, out: Path, texts: dict[str, Path], env: dict[str, str]) -> dict[str, Any]:
    """Convert, distil and measure one case, in processes with the environment ``env``."""
    began, gpus, folder = time.time(), case.get("gpus", 1), out / case["name"]
    folder.mkdir(parents=True, exist_ok=True)
    if gpus > 1:
        env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(gpu_names(gpus))}
    original, student = teacher, folder / "student"
    if "from" in case:
        healed = out / case["from"] / "run" / "final"
        original = healed if healed.exists() else out / case["from"]
    if case["wiring"] == "standard":
        student = original
    elif not student.exists():
        wiring, _, variant = case["wiring"].partition(" ")
        words = ["--wiring", wiring, "--layers", case["layers"], "--no-check"]
        words += ["--variant", variant] if variant else []
        words += ["--tp-degree", case["tp_degree"]] if "tp_degree" in case else []
        _fcsd(folder, env, "convert", original, student, *words)
    recipe = recipe_of(case, student, folder, texts)
    if "from" in case:  # a conversion records the model that it was made from, which is not this teacher
        recipe |= {"teacher": str(teacher), "teacher_sha256": fingerprint(read_layout(teacher))}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    final = folder / "run" / "final"
    if not final.exists():
        _fcsd(folder, env, "distill", folder / "recipe.yaml", "--gpus", gpus)
    lines = stored(folder / "run" / "metrics.jsonl")
    rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    held_out = [[line["step"], line["held_out_kl"]] for line in lines if "held_out_kl" in line]
    words = [f"--text={text}={where}" for text, where in texts.items()]
    command = [sys.executable, "-m", "studies.real", "heal", teacher, out, "--cases", os.devnull, *words, "--measure"]
    command += [student, final] if case.get("untrained") else [final]
    with (folder / "log.txt").open("a") as log:
        told = subprocess.run(list(map(str, command)), env=env, check=True, stdout=subprocess.PIPE, stderr=log).stdout
    *untrained, kl = map(json.loads, told.splitlines())
    found = {
        **case,
        "steps": recipe["train"]["steps"],
        "tokens_per_second": rates[len(rates) // 2] if rates else None,
        "held_out": held_out,
        "kl": kl,
    }
    if untrained:
        found["untrained_kl"] = untrained[0]
    # Of many short runs they would fill the disk.
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    return {**found, "seconds": time.time() - began}


def scores(case: dict[str, Any], given: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """What a healed model, and its untrained conversion if the case asks for it, score beside the teacher."""
    folder, name = given.out / case["name"], case["name"]
    (folder / "eval").mkdir(exist_ok=True)
    if not (folder / "eval" / "answers").exists():  # the cases share the answers of the original
        (given.out / "answers").mkdir(exist_ok=True)
        (folder / "eval" / "answers").symlink_to((given.out / "answers").absolute())
    links = {"original": given.teacher, name: folder / "run" / "final"}
    if case.get("untrained"):
        links[f"{name}-untrained"] = folder / "student"
    paths = {}
    for link, model in links.items():  # results call a model after its directory
        paths[link] = folder / "eval" / "models" / link
        paths[link].parent.mkdir(parents=True, exist_ok=True)
        paths[link].unlink(missing_ok=True)
        paths[link].symlink_to(model.absolute())
    words = ["--tasks", tasks_of(given.mirror, given.tasks), "--limit", given.limit, "--data-mirror", given.mirror]
    words += ["--untrained", paths[f"{name}-untrained"]] if case.get("untrained") else []
    words += ["--held-out", given.held_out] if given.held_out else []
    words += ["--baseline", paths.pop("original"), "--out", folder / "eval", "--json"]
    _fcsd(folder, env, "eval", *paths.values(), *words, out=folder / "eval.json")
    files = [file for file in sorted((folder / "eval").glob("*.json")) if file.name != COMPARISON]
    return {
        "scores": {
            file.stem: {
                row["column"]: {key: row[key] for key in ("value", "stderr", "n", "metric")}
                for row in json.loads(file.read_text())
            }
            for file in files
        },
        "differences": json.loads((folder / "eval" / COMPARISON).read_text()),  # paired
    }


def _fcsd(folder: Path, env: dict[str, str], *arguments: object, out: Path | None = None) -> None:
    """Run a command of fcsd, whose output goes to the log of a case, or to a file."""
    with (folder / "log.txt").open("a") as log:
        words = [sys.executable, "-m", "fcsd", *map(str, arguments)]
        where = log if out is None else out.open("w")
        subprocess.run(words, check=True, env=env, stdout=where, stderr=log)


def tasks_of(mirror: Path, tasks: str = TASKS) -> str:
    """The benchmarks, and LAMBADA's task if the mirror has its data set."""
    return f"{tasks},lambada_openai" if (mirror / DATA_SET).is_dir() else tasks


def recipe_of(case: dict[str, Any], student: Path, folder: Path, texts: dict[str, Path]) -> dict[str, Any]:
    """The recipe of a case, with the values of SmolLM2's table unless the case sets others."""
    names = case["text"].split("+")
    batch, lr = case.get("batch", BATCH), case["lr"]
    steps = max(1, round(case["tokens"] / batch))

    both = "own" in texts and names[0] != "own"

    def source(name: str, part: str) -> dict[str, Any]:
        return {"path": f"{texts[name]}/{part}/*.parquet", "token_ids": "input_ids"}

    recipe: dict[str, Any] = {
        "name": case["name"],
        "model": str(student),
        "output_dir": str(folder / "run"),
        "seed": case.get("seed", 0),
        "data": {
            "seq_len": SEQ,
            "sources": [source(name, "train") for name in names],
            "held_out": {**source(names[0], "held_out"), "max_rows": 300},
            "held_out_own": {**source("own", "held_out"), "max_rows": 300} if both else None,
        },
        "objective": {"kl": 1.0, "sft": 0.0},
        "train": {"batch_tokens": batch, "micro_batch_size": min(MICRO, batch // SEQ // case.get("gpus", 1)),
                  "steps": steps, "log_every": 5, "eval_every": max(1, steps // 3), "sample_tokens": 0,
                  "compile": True},
        "optim": {"lr": lr, "min_lr": lr / 50, "warmup_steps": max(1, min(50, steps // 10))},
        "checkpoint": {"every_steps": 0, "keep": 1},
    }  # fmt: skip
    for key, value in case.get("set", {}).items():
        *sections, last = key.split(".")
        place = recipe
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return recipe
