"""Trains the bundled model through wires of several formats, and compares the held-out KL at the end of the runs.

    python scripts/wire_study.py OUT [--formats bf16 int8 int6 int5 int4] [--seeds 0 1 2] [--stochastic gradients]

Every run follows `recipes/tiny.yaml`, or `--recipe`, with one format for all four directions. The rows are rounded in
each process, nothing is sent, and evaluations are not rounded: the KL is that of the model that would be exported. A
format is called free if its mean KL differs from that of bf16 by at most the spread of bf16 over the seeds.

The study can be interrupted. Run it again to continue: runs that have ended are not repeated, and a run that was cut
off resumes from its last checkpoint. `OUT/wire_study.json` and the table on stdout hold the runs that have ended.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from fcsd.distill.run.report import read_metrics
from fcsd.kernels.bit_split import Format
from fcsd.parallel.wire import DIRECTIONS

BF16 = "bf16"


def main() -> None:
    """Takes the missing runs, and writes and prints what all of them found."""
    args = _arguments().parse_args()
    student = args.out / "student"
    if not (student / "config.json").exists():
        _fcsd("convert", "assets/teacher", str(student), "--wiring", "farskip")
    for seed in args.seeds:
        for name in args.formats:
            run = folder(args.out, name, seed)
            if not (run / "final").exists():
                _fcsd("distill", *settings(args.recipe, student, run, name, seed, args.stochastic), *args.options)
            found = collect(args.out, args.formats, args.seeds)
            (args.out / "wire_study.json").write_text(json.dumps(found, indent=1))
    print(table(found))


def settings(recipe: str, student: Path, run: Path, name: str, seed: int, stochastic: str) -> list[str]:
    """The arguments of `fcsd distill` for one run."""
    values = {"model": str(student), "seed": seed}
    if name != BF16:
        values |= {f"parallel.wire.{direction}": name for direction in DIRECTIONS}
        values["parallel.wire.stochastic"] = f'"{stochastic}"'  # YAML reads a bare off as false
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return ["--recipe", recipe, "--output-dir", str(run), *sets]


def folder(out: Path, name: str, seed: int) -> Path:
    """The run directory of a format and a seed."""
    return out / "runs" / f"{name.replace(':', '-')}-seed-{seed}"


def collect(out: Path, names: list[str], seeds: list[int]) -> dict[str, dict[str, float]]:
    """Format -> seed -> held-out KL after the last step, for the runs that have ended."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        ended = {str(seed): run for seed in seeds if ((run := folder(out, name, seed)) / "final").exists()}
        found[name] = {seed: read_metrics(run)[-1]["held_out_kl"] for seed, run in ended.items()}
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """A line for each format: bits per value, the KL of each seed, the mean, and whether it is free."""
    exact = list(found.get(BF16, {}).values())
    lines = [
        "| format | bits per value | KL of each seed | mean | difference to bf16 | free |",
        "|---|---|---|---|---|---|",
    ]
    for name, by_seed in found.items():
        values = list(by_seed.values())
        if not values:
            continue
        bits = 16 if name == BF16 else Format.parse(name).bits_per_value
        difference, free = "-", "-"
        if name != BF16 and exact:
            difference = f"{mean(values) - mean(exact):+.5f}"
            free = "yes" if abs(mean(values) - mean(exact)) <= max(exact) - min(exact) else "no"
        shown = ", ".join(f"{value:.5f}" for value in values)
        lines.append(f"| {name} | {bits:g} | {shown} | {mean(values):.5f} | {difference} | {free} |")
    return "\n".join(lines)


def _fcsd(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "fcsd", *words])
    if done.returncode:
        sys.exit(done.returncode)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of all runs and of the results")
    parser.add_argument("--recipe", default="tiny", help="recipe of the runs; it must measure a held-out KL")
    parser.add_argument("--formats", nargs="+", default=[BF16, "int8", "int6", "int5", "int4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--stochastic", choices=["off", "gradients", "all"], default="off")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options of fcsd distill")
    return parser


if __name__ == "__main__":
    main()
