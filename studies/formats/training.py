"""Trains the bundled model through wires of several formats, several models at a time, and compares where they end.

    python studies/formats/training.py OUT [--processes 12] [--minutes 9] [--formats bf16 int8 ...] [--seeds 0 1 2]

Every run follows `recipes/tiny.yaml`, or `--recipe`, with one format for all four directions, or for dispatch and
combine only (`forward`). The rows are rounded in each process, nothing is sent, and evaluations are not rounded: the
held-out KL and the scores of the tasks are those of the model that would be exported. Runs with the same seed see the
same text in the same order, so a format is compared with bf16 seed by seed. A format is called free if its mean KL is
above that of bf16 by no more than the spread of bf16 over the seeds, and its mean score is not further below.

Every process trains and scores one model after the other. They share one GPU, or the CPU without one. No run starts
after `--minutes`; the same command continues the study, and resumes runs that were cut off from their last checkpoint.
`OUT/wire_study.json` holds the runs that have ended, and the table is printed. The runs of the first seed come first,
so a study that was cut off compares whole seeds.
"""

import argparse
import atexit
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs as a program, too

from studies.formats.plan import TASKS

from fcsd import markdown
from fcsd.disk import write_text
from fcsd.distill.run.report import read_metrics
from fcsd.kernels.bit_split import Format
from fcsd.parallel.quantised.rows import DIRECTIONS

ROOT = Path(__file__).resolve().parents[2]
BF16 = "bf16"
MIRROR = "assets/mirror"
RESULT = "wire_study.json"
Directions = Literal["all", "forward"]
FORWARD = DIRECTIONS[:2]


class Case(NamedTuple):
    """One run: a format, the directions that it rounds, and a seed. ``bf16`` rounds nothing."""

    format: str
    directions: Directions
    seed: int

    @property
    def name(self) -> str:
        """The name of its run directory."""
        way = "" if self.format == BF16 else f"-{self.directions}"
        return f"{self.format.replace(':', '-')}{way}-seed-{self.seed}"


class Settings(NamedTuple):
    """What all runs of a study have in common.

    Attributes:
        recipe: a packaged recipe or a file; it must measure a held-out KL.
        stochastic: `parallel.quantised.stochastic` of the runs.
        options: more settings, each as `fcsd distill --set` takes it.
        tasks: what the trained models are scored on; none for the KL alone.
        limit: how many questions of each task are scored; None for all.
    """

    recipe: str
    stochastic: str
    options: tuple[str, ...]
    tasks: tuple[str, ...]
    limit: int | None


def cases(formats: Sequence[str], directions: Sequence[Directions], seeds: Sequence[int]) -> list[Case]:
    """The runs of a study: all formats with the first seed, then with the next one."""
    found = [
        Case(name, way, seed)
        for seed in seeds
        for name in formats
        for way in (directions[:1] if name == BF16 else directions)
    ]
    return list(dict.fromkeys(found))


def overrides(settings: Settings, student: Path, case: Case) -> list[str]:
    """The values of one run that differ from the recipe, each as `fcsd distill --set` takes it."""
    values = {"model": str(student), "seed": case.seed}
    if case.format != BF16:
        rounded = DIRECTIONS if case.directions == "all" else FORWARD
        values |= {f"parallel.quantised.{direction}": case.format for direction in rounded}
        if case.directions == "all" or settings.stochastic == "all":  # without gradients there are none to round
            values["parallel.quantised.stochastic"] = f'"{settings.stochastic}"'  # YAML reads a bare off as false
    return [*(f"{key}={value}" for key, value in values.items()), *settings.options]


def prepare(settings: Settings, out: Path, first: Case) -> None:
    """Convert the teacher, and tokenise the text into the cache, in which runs that start together find it."""
    from fcsd.config.resolve import load_recipe
    from fcsd.convert import convert_checkpoint
    from fcsd.distill.loop import distill_model

    student = out / "student"
    if not (student / "config.json").exists():
        convert_checkpoint(ROOT / "assets/teacher", student, wiring="farskip", check=False)
    flags = {"output_dir": str(out / "runs" / first.name)}
    distill_model(load_recipe(settings.recipe, overrides(settings, student, first), flags), dry_run=True)


def train(settings: Settings, out: Path, case: Case, latest_start: float) -> dict[str, Any] | None:
    """Train and score one model.

    Args:
        latest_start: the time, in seconds since the epoch, after which no run starts.

    Returns: the line of the run in the results; None if it did not start.
    """
    if time.time() > latest_start:
        return None
    from fcsd.config.resolve import load_recipe
    from fcsd.distill.loop import distill_model

    run = out / "runs" / case.name
    resolved = load_recipe(settings.recipe, overrides(settings, out / "student", case), {"output_dir": str(run)})
    begun = time.perf_counter()
    if not (run / "final").exists():
        distill_model(resolved)
    trained = time.perf_counter() - begun
    last = read_metrics(run)[-1]
    recipe = resolved.recipe
    line = case._asdict() | {"steps": recipe.train.steps, "batch_tokens": recipe.train.batch_tokens}
    line |= {"lr": recipe.optim.lr, "dtype": recipe.train.dtype, "held_out_kl": last["held_out_kl"]}
    line |= {"held_out_sft": last["held_out_sft"], "scores": scores(settings, run / "final")}
    return line | {"seconds": round(trained, 1), "seconds of scores": round(time.perf_counter() - begun - trained, 1)}


def scores(settings: Settings, model: Path) -> dict[str, dict[str, float]]:
    """Task -> the fraction of right answers, its standard error, and the number of questions. Weights are in fp32."""
    if not settings.tasks:
        return {}
    import torch
    from transformers import AutoTokenizer

    from fcsd.eval.engines.engine import Engine
    from fcsd.eval.harness import Loaded, evaluate_models
    from fcsd.models.build import load_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_model(model, dtype=torch.float32, device=device).eval()
    loaded = Loaded("model", network, AutoTokenizer.from_pretrained(model))
    results = evaluate_models(
        [loaded], tasks=settings.tasks, limit=settings.limit, data_mirror=ROOT / MIRROR, engine=Engine(batch_size=64)
    )
    return {result["column"]: {key: result[key] for key in ("value", "stderr", "n")} for result in results}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A row for each format and its directions: bits per value, KL and score beside those of bf16, and if it is free.

    Differences are means over the seeds that both have, with the standard error of the mean where there are several.
    """
    body = []
    for name, way in dict.fromkeys((run["format"], run["directions"]) for run in runs):
        own = [run for run in runs if (run["format"], run["directions"]) == (name, way)]
        body.append([f"`{name}`", "-" if name == BF16 else way, f"{_bits(name):g}", str(len(own))])
        free = []
        for measure, worse, digits in ((_kl, 1, 5), (_score, -1, 2)):
            values, plain = _by_seed(own, measure), _by_seed((run for run in runs if run["format"] == BF16), measure)
            changes = [values[seed] - plain[seed] for seed in sorted(values.keys() & plain.keys())]
            body[-1].append(f"{mean(values.values()):.{digits}f}" if values else "-")
            if name == BF16:
                body[-1].append(f"spread {_spread(plain):.{digits}f}" if plain else "-")
            else:
                body[-1].append(_with_error(changes, digits) if changes else "-")
                free += [worse * mean(changes) <= _spread(plain)] if changes else []
        body[-1].append("-" if not free else "yes" if all(free) else "no")
    head = ["Format", "Directions", "Bits as sent", "Seeds", "Held-out KL", "minus bf16"]
    return markdown.table([*head, "Average score", "minus bf16", "Free"], body, left=2)


def _by_seed(runs: Iterable[dict[str, Any]], measure: Callable[[dict[str, Any]], float | None]) -> dict[int, float]:
    """Seed -> what was measured, without the runs in which it was not."""
    return {run["seed"]: value for run in runs if (value := measure(run)) is not None}


def _bits(name: str) -> float:
    return 16 if name == BF16 else Format.parse(name).bits_per_value


def _place(run: dict[str, Any]) -> tuple[str, str, int]:
    return run["format"], run["directions"], run["seed"]


def _kl(run: dict[str, Any]) -> float:
    return run["held_out_kl"]


def _score(run: dict[str, Any]) -> float | None:
    """The mean of the tasks, in percent."""
    return 100 * mean(score["value"] for score in run["scores"].values()) if run["scores"] else None


def _spread(values: dict[int, float]) -> float:
    return max(values.values()) - min(values.values())


def _with_error(changes: Sequence[float], digits: int) -> str:
    error = f" ± {stdev(changes) / len(changes) ** 0.5:.{digits}f}" if len(changes) > 1 else ""
    return f"{mean(changes):+.{digits}f}{error}"


def _start_worker(logs: Path) -> None:
    """Write what this process prints into a file of its own, and load now what every run needs."""
    # Registered before all others, it is called after them. DeepSpeed's process groups have threads that can make an
    # interpreter abort while it is finalised; `fcsd.launch.world.leave` explains it.
    atexit.register(os._exit, 0)
    file = os.open(logs / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import fcsd.distill.loop
    import fcsd.eval.harness  # noqa: F401


def _known(path: Path, settings: Settings) -> list[dict[str, Any]]:
    """The runs that have ended in an earlier call.

    Raises:
        SystemExit: they were made with other settings.
    """
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    if stored["settings"] != json.loads(json.dumps(settings._asdict())):
        sys.exit(f"{path} holds runs with other settings. Give the same options, or another OUT.")
    return stored["runs"]


def _machine() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def main() -> int:
    """Take the missing runs, and write and print what all of them found."""
    args = _arguments().parse_args()
    out: Path = args.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    settings = Settings(args.recipe, args.stochastic, tuple(args.set), tuple(filter(None, args.tasks)), args.limit)
    runs = _known(out / RESULT, settings)
    ended = {_place(run) for run in runs}
    missing = [case for case in cases(args.formats, args.directions, args.seeds) if tuple(case) not in ended]
    about = {"settings": settings._asdict(), "device": _machine(), "processes": args.processes}
    about["versions"] = {name: version(name) for name in ("torch", "transformers", "deepspeed", "lm_eval")}
    latest, failed = time.time() + 60 * args.minutes, 0
    spawned = multiprocessing.get_context("spawn")  # a process that has used a GPU cannot be forked
    workers = max(1, min(args.processes, len(missing)))
    with ProcessPoolExecutor(workers, spawned, _start_worker, (out / "logs",)) as pool:
        prepared = pool.submit(prepare, settings, out, missing[0]) if missing else None
        for _ in range(workers - 1):
            pool.submit(int)  # it has nothing to do, but starts a worker, which meanwhile loads what every run needs
        if prepared is not None and (error := prepared.exception()):
            sys.exit(str(error))
        begun: dict[Future[dict[str, Any] | None], Case] = {
            pool.submit(train, settings, out, case, latest): case for case in missing
        }
        try:
            for future in as_completed(begun):
                if error := future.exception():
                    failed += 1
                    print(f"{begun[future].name} failed: {error}", file=sys.stderr)
                elif line := future.result():
                    runs.append(line)
                    runs.sort(key=lambda run: (run["seed"], -_bits(run["format"]), run["directions"]))
                    write_text(out / RESULT, _compact({**about, "runs": runs}))
                    print(f"{begun[future].name}: held-out KL {line['held_out_kl']:.5f}", file=sys.stderr)
        finally:
            pool.shutdown(cancel_futures=True)
    print(table(runs))
    left = len(missing) + len(ended) - len(runs)
    print(f"{len(runs)} runs have ended, {failed} have failed, {left - failed} have not started.", file=sys.stderr)
    return 1 if left else 0


def _compact(found: dict[str, Any]) -> str:
    """JSON with one line for each run."""
    head = json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1).removesuffix("\n}")
    return head + ',\n "runs": [\n  ' + ",\n  ".join(map(json.dumps, found["runs"])) + "\n ]\n}\n"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of all runs and of the results")
    parser.add_argument("--recipe", default="tiny", help="recipe of the runs; it must measure a held-out KL")
    parser.add_argument("--formats", nargs="+", default=[BF16, "int8", "int6", "int5", "int4"])
    parser.add_argument("--directions", nargs="+", choices=get_args(Directions), default=list(get_args(Directions)))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--stochastic", choices=["off", "gradients", "all"], default="off")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of all runs")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help='tasks of the scores; "" for none')
    parser.add_argument("--limit", type=int, help="questions of each task")
    parser.add_argument("--processes", type=int, default=1, help="models at a time")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run starts after this time")
    return parser


if __name__ == "__main__":
    # Workers do not notice that this process is gone. A request to end therefore ends the pool first.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
