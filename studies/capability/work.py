"""Does runs of the capability study in a piece of at most ten minutes, several models at a time on one GPU.

    python studies/capability/work.py table-1 recovery --work DIR --new FILE [--results FILE ...] [--minutes 9]

Runs whose line is in one of the results are not repeated. At the end of the time, runs that have not ended save a
checkpoint; the same command with the same DIR continues them. A line is added to FILE for every sweep and every model
that has ended. Texts, sweeps and runs start in this order, each as soon as what it needs is done.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs as a program, too

from studies.capability.forks import ROOT, Forks
from studies.capability.jobs import Clock, Job, together
from studies.capability.results import append, packed, read_lines
from studies.capability.runs import (
    BUNDLED,
    KL,
    STARTING_VALUES,
    SWEEP_STEPS,
    TABLE_2,
    TEXTS,
    TOKEN_IDS,
    WRITTEN,
    WRITTEN_FROM,
    Run,
    Subject,
    recipe_of,
    sweeps,
    text_name,
    text_share,
    trial_recipe,
)
from studies.capability.scratch import scratch_results, write_config
from studies.capability.studies import BUNDLED_ONLY, DENSE_ONLY, SIBLINGS, studies

from fcsd.distill.run.report import read_metrics
from fcsd.eval.results import read_directory

TEACHER, MIRROR, HELD_OUT = "assets/teacher", "assets/mirror", "assets/corpus/held_out.jsonl"
FCSD = [sys.executable, "-m", "fcsd"]


class Study:
    """The state of a piece of work: what is known, where it lies, and how commands run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = args.work.resolve()
        self.teacher = TEACHER if args.teacher is None else str(args.teacher.resolve())
        self.subject = Subject(BUNDLED.teacher if args.teacher is None else self.teacher, args.wiring)
        self.clock = Clock(args.minutes)
        self.lines = read_lines([*args.results, args.new])
        self.trials: dict[tuple[str, int, int], dict[str, Any]] = {}  # by sweep, stage and number
        self.lock, self.converting = threading.Lock(), threading.Lock()
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = given.split(",") if given else [str(gpu) for gpu in range(args.gpus)]
        self.device = device_name(args.device, self.gpus[0])
        self.env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.work / "cache")}
        self.env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // args.processes))
        self.forks: Forks | None = None  # without it, commands are ordinary processes
        self.ready = threading.Event()  # set when it is known how commands are started

    def import_libraries(self) -> None:
        """Start commands as forks from now on, if a fork can compute on the device."""
        start, log = time.monotonic(), self.work / "logs" / "forks.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            forks = Forks(self.env)
            if not forks.work(self.args.device, log, self.env | self.seen(0)):
                raise RuntimeError(f"a fork cannot compute on the device, so commands are ordinary processes: {log}")
            self.forks = forks
            print(f"libraries imported in {time.monotonic() - start:.0f} s; commands are forks", flush=True)
        finally:
            self.ready.set()

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """The values that the sweeps chose, by the name of the sweep."""
        return {name: line["chosen"] for name, line in self.lines.items() if "chosen" in line}

    def store(self, line: dict[str, Any]) -> None:
        """Add a line to the new results, with what it depends on."""
        about = {"teacher_tokens": self.args.teacher_tokens, "limit": self.args.limit, "device": self.device}
        about |= {"teacher": Path(self.teacher).name, "wiring": self.subject.wiring}
        line |= about | {"versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")}}
        with self.lock:
            self.lines[line["name"]] = line
            append(self.args.new, line)

    def seen(self, gpu: int) -> dict[str, str]:
        """The variables that let a process see one GPU."""
        return {"CUDA_VISIBLE_DEVICES": self.gpus[gpu]} if self.args.device == "cuda" else {}

    def fcsd(self, words: list[str], log: str, gpu: int) -> None:
        """Run a command of fcsd on a GPU."""
        self.ready.wait()
        command = [*FCSD, *words] if self.forks is None else words
        self.clock.run(command, self.work / "logs" / f"{log}.log", self.env | self.seen(gpu), self.forks)


def device_name(device: str, gpu: str) -> str:
    """The name of a GPU, by its number or its identifier, or that of the processor.

    The driver's tool is asked and not torch: MPS changes the numbers of the GPUs for all clients, and this process
    should be none of them.
    """
    if device != "cuda":
        return platform.processor() or platform.machine()
    words = ["nvidia-smi", f"--id={gpu}", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def write_text(study: Study, kind: str, share: float, gpu: int) -> None:
    """Write and tokenise a text that is long enough for ``share`` of the teacher's tokens. A GPU writes ``WRITTEN``."""
    name = text_name(kind, share)
    out, log = study.work / "text" / name, f"text-{name}"
    if (out / "tokenised").exists():
        return
    if kind in WRITTEN:
        model = converted(study, Run("untrained"), gpu) if WRITTEN[kind] == "untrained" else study.teacher
        source = study.work / "text" / text_name(WRITTEN_FROM, share) / "train.jsonl"
        command = [sys.executable, "-m", "studies.capability.written", "--model", str(model)]
        command += ["--device", study.args.device]
    else:
        what, wrong = TEXTS[kind]
        source = study.args.teacher_text if what == "same" else study.args.other_text
        command = [sys.executable, "-m", "studies.capability.text", "--kind", what, "--wrong", str(wrong)]
        command += ["--token-ids"] if kind in TOKEN_IDS else []
    command += ["--tokens", str(round(share * study.args.teacher_tokens)), "--out", str(out)]
    command += ["--text", str(source)] if source else []
    study.clock.run(command, study.work / "logs" / f"{log}.log", study.env | study.seen(gpu))
    # The dry run tokenises the text into the cache of ``datasets``, so that runs that start together find it there.
    first = Run("tokenise", kind, share, settings=KL)
    values = {first.values_from: STARTING_VALUES}
    recipe = recipe_of(first, values, study.args.teacher_tokens, study.work, "cpu", study.subject)
    study.fcsd(["distill", str(_write_recipe(study, log, recipe)), "--dry-run"], log, 0)
    (out / "tokenised").touch()


def do_trial(study: Study, name: str, stage: int, number: int, gpu: int) -> None:
    """Train for a few steps with one value of a stage, and with what the stages before it chose."""
    key, values = sweeps()[name]["stages"][stage]
    trial = best_of(study, name, stage) | {key: values[number]}
    args = study.args
    recipe = trial_recipe(name, trial, study.chosen, args.sweep_steps, study.work, args.device, study.subject)
    study.fcsd(["distill", str(_write_recipe(study, recipe["name"], recipe))], f"sweep-{recipe['name']}", gpu)
    metric, window = sweeps()[name]["metric"], max(1, args.sweep_steps // 3)
    last = [record[metric] for record in read_metrics(Path(recipe["output_dir"])) if metric in record][-window:]
    with study.lock:
        study.trials[name, stage, number] = {"values": trial, "value": sum(last) / len(last)}


def best_of(study: Study, name: str, stage: int) -> dict[str, Any]:
    """The values of the best trial of the stage before this one; none before the first stage."""
    before = [trial for (sweep, at, _), trial in study.trials.items() if (sweep, at) == (name, stage - 1)]
    return min(before, key=lambda trial: trial["value"])["values"] if before else {}


def choose(study: Study, name: str) -> None:
    """Store what a sweep chose, after its trials."""
    start = study.chosen["kl-same"] if name == "hidden-same" else {}
    values = start | best_of(study, name, len(sweeps()[name]["stages"]))
    trials = [trial for (sweep, *_), trial in sorted(study.trials.items()) if sweep == name]
    study.store({"name": name, "chosen": values, "trials": trials})


def do_run(study: Study, run: Run, gpu: int) -> None:
    """Train and evaluate a model, or continue, and store its line."""
    line: dict[str, Any] = {"name": run.name, "run": run.to_json()}
    if run.text:
        args = study.args
        recipe = recipe_of(run, study.chosen, args.teacher_tokens, study.work, args.device, study.subject)
        words = ["distill", str(_write_recipe(study, run.name, recipe))]
        words += ["--accept-unsafe-exec"] if run.early_stop else []
        line["set"] = args.set if run.share >= args.set_from else []
        study.fcsd([*words, *(word for setting in line["set"] for word in ("--set", setting))], run.name, gpu)
        out = Path(recipe["output_dir"])
        model, metrics = out / "final", read_metrics(out)
        line |= {"lr": recipe["optim"]["lr"], "batch_tokens": recipe["train"]["batch_tokens"]}
        line |= {"steps": metrics[-1]["step"], "seconds": seconds_in_steps(metrics), "metrics": metrics[-1]}
        line["planned_steps"] = recipe["train"]["steps"]
        line["scores"] = [[record["step"], record["score"]] for record in metrics if "score" in record]
        if run.from_scratch:
            with study.lock:  # transformers cannot be imported by two threads at the same time
                line |= scratch_results(metrics, model)
            study.store(line)
            return
        if run.export:
            model = study.work / "exported" / run.name
            study.fcsd(["export", str(out), str(model), "--force"], run.name, gpu)
    elif run.method == "teacher":
        model = ROOT / study.teacher
    else:
        model = converted(study, run, gpu)
    out = study.work / "eval" / run.name
    words = ["eval", str(model), "--suite", "strict", "--data-mirror", MIRROR, "--held-out", HELD_OUT]
    words += ["--out", str(out), "--device", study.args.device, "--accept-unsafe-exec"]
    words += ["--log-samples", *(["--limit", str(study.args.limit)] if study.args.limit else [])]
    study.fcsd(words, run.name, gpu)
    line["results"] = [packed(result) for result in read_directory(out)]
    study.store(line)


def converted(study: Study, run: Run, gpu: int) -> Path:
    """The untrained conversion with the wiring of the run, which is made if there is none yet."""
    model = study.work / "untrained" / run.name
    with study.converting:  # a run and a text may need the same one at the same time
        if not (model / "config.json").exists():
            study.fcsd(["convert", study.teacher, str(model), *wiring_options(run, study.subject)], run.name, gpu)
    return model


def wiring_options(run: Run, subject: Subject) -> list[str]:
    """The options of ``fcsd convert`` for the wiring that the recipe of the run would have."""
    init = {"wiring": subject.wiring, "layers": run.layers}
    init |= {key.removeprefix("init."): value for key, value in run.settings.items()}
    return [word for key, value in init.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def seconds_in_steps(metrics: list[dict[str, Any]]) -> float:
    """The time that a run spent in steps. ``seconds`` in its records begins anew when the run is resumed."""
    after = [*(record["seconds"] for record in metrics[1:]), 0.0]
    return sum(record["seconds"] for record, later in zip(metrics, after, strict=True) if later < record["seconds"])


def _write_recipe(study: Study, name: str, recipe: dict[str, Any]) -> Path:
    path = study.work / "recipes" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=1))
    return path


def missing(study: Study, names: Iterable[str], up_to: float) -> tuple[list[Run], list[str]]:
    """The runs of the studies that have no line yet, and the sweeps that these need and that have none.

    Args:
        up_to: the largest share of the teacher's tokens of a run.
    """
    named = [run for name in names for run in studies()[name] if run.share <= up_to]
    runs = {run.name: run for run in named if run.name not in study.lines}
    needed = dict.fromkeys(name for run in runs.values() for name in sweeps_of(run))
    return list(runs.values()), [name for name in needed if name not in study.lines]


def sweeps_of(run: Run) -> list[str]:
    """The sweeps whose values a run takes."""
    hidden = run.settings.get("objective.hidden.weight")
    return [name for name in (run.values_from, hidden) if isinstance(name, str) and name]


def text_of_sweep(name: str) -> str:
    """The text on which a sweep trains."""
    return sweeps()[name]["text"]


def texts_of(runs: list[Run], sweeps: list[str]) -> list[tuple[str, float]]:
    """The texts that runs and sweeps need: their kinds, and their lengths as shares of the teacher's tokens."""
    needed = [(text_of_sweep(name), text_share(0.0)) for name in sweeps]
    needed += [(WRITTEN_FROM, run.text_share) for run in runs if run.text in WRITTEN]
    return list(dict.fromkeys([*needed, *((run.text, run.text_share) for run in runs if run.text)]))


def text_jobs(study: Study, runs: list[Run], names: list[str]) -> list[Job]:
    """The texts of runs and of the sweeps with these names."""
    return [
        Job(
            text_name(kind, share),
            (text_name(WRITTEN_FROM, share),) if kind in WRITTEN else (),
            lambda gpu, k=kind, s=share: write_text(study, k, s, gpu),
        )
        for kind, share in texts_of(runs, names)
    ]


def jobs_of(study: Study, runs: list[Run], names: list[str]) -> list[Job]:
    """Texts, the trials of the sweeps with these names, and runs, in the order in which they should start."""
    jobs = text_jobs(study, runs, names)
    for name in names:
        needs = (text_name(text_of_sweep(name), 0), *(("kl-same",) if name == "hidden-same" else ()))
        for stage, (_, values) in enumerate(sweeps()[name]["stages"]):
            trials = tuple(f"{name} {stage} {number}" for number in range(len(values)))
            for number, trial in enumerate(trials):
                jobs.append(Job(trial, needs, lambda gpu, s=name, at=stage, n=number: do_trial(study, s, at, n, gpu)))
            needs = trials
        jobs.append(Job(name, needs, lambda _, s=name: choose(study, s)))
    for run in runs:
        needs = (text_name(run.text, run.text_share), *sweeps_of(run)) if run.text else ()
        jobs.append(Job(run.name, needs, lambda gpu, r=run: do_run(study, r, gpu), run.share))
    known = {job.name for job in jobs}  # what is not among them is done
    return [replace(job, needs=tuple(name for name in job.needs if name in known)) for job in jobs]


@contextmanager
def shared_gpus(study: Study) -> Iterator[None]:
    """Lets the processes of a GPU compute at the same time, by NVIDIA's MPS, where it is installed.

    Without it they take turns, and a model of this size leaves most of the GPU idle in its turn.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if study.args.device != "cuda" or control is None:
        yield
        return
    pipes = study.work / "mps"
    pipes.mkdir(parents=True, exist_ok=True)
    study.env |= {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    env = study.env | {"CUDA_VISIBLE_DEVICES": ",".join(study.gpus)}
    study.gpus = [str(number) for number, _ in enumerate(study.gpus)]  # clients count the GPUs that the daemon sees
    subprocess.run([control, "-d"], env=env, check=True)
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n", env=env, check=False)


def main() -> int:
    parser = _arguments()
    args = parser.parse_args()
    if args.teacher is not None and (named := sorted({*args.studies} & {*BUNDLED_ONLY})):
        parser.error(f"{', '.join(named)}: these studies are about the bundled teacher; leave out --teacher")
    if args.teacher is None and (named := sorted({*args.studies} & {*DENSE_ONLY})):
        parser.error(f"{', '.join(named)}: these studies need a dense teacher; name its directory with --teacher")
    study = Study(args)
    runs, sweeps = missing(study, args.studies, args.up_to)
    for model in {run.model for run in runs if run.model}:
        write_config(model, study.work)
    with shared_gpus(study):
        jobs = (text_jobs if args.texts_only else jobs_of)(study, runs, sweeps)
        if args.forks:
            jobs = [Job("libraries", (), lambda _: study.import_libraries()), *jobs]
        else:
            study.ready.set()
        done = together(jobs, args.processes, len(study.gpus))
    study.clock.stop()
    left, _ = missing(study, args.studies, args.up_to)
    if args.texts_only:
        print(f"{len(jobs) - args.forks} texts {'written' if done else 'wanted; not all are written'}")
        return 0 if done else 1
    print(f"{len(runs) - len(left)} of {len(runs)} runs done; left: {', '.join(run.name for run in left) or 'none'}")
    return 0 if done else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=list(studies()))
    parser.add_argument("--work", type=Path, required=True, help="texts, runs and evaluations; kept between pieces")
    parser.add_argument("--new", type=Path, required=True, help="file that gets the lines of this piece")
    parser.add_argument("--results", type=Path, nargs="*", default=[], help="files with the lines of earlier pieces")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--processes", type=int, default=8, help="models at a time")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--forks", action=argparse.BooleanOptionalAction, default=True, help="import libraries once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--teacher", type=Path, help="directory of another teacher; default: the bundled one")
    parser.add_argument("--wiring", choices=list(SIBLINGS), default=BUNDLED.wiring)
    parser.add_argument("--teacher-tokens", type=int, required=True, help="tokens that the teacher was trained on")
    parser.add_argument("--teacher-text", type=Path, help="the teacher's real text; default: runs/teacher/train.jsonl")
    parser.add_argument("--other-text", type=Path, help="other real text; default: the installed Python packages")
    parser.add_argument("--sweep-steps", type=int, default=SWEEP_STEPS)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of all long runs, for speed: train.graph=true; repeatable",
    )
    parser.add_argument(
        "--set-from", type=float, default=TABLE_2, help="the share of the tokens from which a run is long"
    )
    parser.add_argument("--texts-only", action="store_true", help="write the texts of the studies, and train nothing")
    parser.add_argument("--up-to", type=float, default=1.0, help="largest share of the teacher's tokens of a run")
    parser.add_argument("--limit", type=int, help="questions of each benchmark; for trials of this script alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
