"""Prefill and decoding of the standard wiring in fcsd's own engine and in vLLM, for the same prompts.

    python benchmarks/vllm/vllm_engines.py OUT --shape llama3-70b --layers 8 --tp 1,2 --batch 1,64

Each engine is one call of ``python -m benchmarks.infer``, whose files are in ``OUT/own`` and ``OUT/vllm``. A row has
the times of both at one degree and batch: of fcsd's engine with its fastest all-reduce backend, and the speed of fcsd's
engine relative to that of vLLM, above 1 where fcsd's is faster. vLLM's times include its scheduler (docs/engine.md).
``benchmarks/vllm/vllm_gpu.sh engines`` runs this on a GPU machine. The exit status is 0 if both calls ended with 0.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks/vllm")]

from vllm_report import Row, begin, ended  # noqa: E402

PHASES = ("prefill", "decode")


def command(engine: str, given: argparse.Namespace) -> list[str]:
    """The call of ``python -m benchmarks.infer`` for one engine, ``own`` or ``vllm``."""
    words = [given.shape, "--engine", engine, "--wirings", "standard"]
    words += ["--reduce", given.reduce if engine == "own" else "vllm", "--out", str(given.out / engine)]
    if engine == "own":
        words += [
            *(["--attention", given.attention] if given.attention else []),
            *(["--no-compile"] if given.no_compile else []),
        ]
    for name in ("layers", "tp", "batch", "prompt", "new", "dtype", "rounds"):
        words += [f"--{name}", str(getattr(given, name))]
    return [sys.executable, "-m", "benchmarks.infer", *words]


def rows_of(file: Path) -> list[Row]:
    """The rows of an ``infer.json``; none if there is no such file."""
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def beside(own: list[Row], vllm: list[Row]) -> list[Row]:
    """A row for each degree and batch that both engines have measured; null stands for what did not fit."""
    found = []
    for theirs in vllm:
        mine = [row for row in own if (row["tp"], row["batch"]) == (theirs["tp"], theirs["batch"])]
        if not mine:
            continue
        row: Row = dict(tp=theirs["tp"], batch=theirs["batch"])
        for phase in PHASES:
            key = f"{phase}_ms"
            best = min(mine, key=lambda row, key=key: float("inf") if row[key] is None else row[key])
            row |= {f"own_{key}": best[key], f"own_{phase}_by": best["reduce"], f"vllm_{key}": theirs[key]}
            both = best[key] is not None and theirs[key] is not None
            row[f"{phase}_times_vllm"] = theirs[key] / best[key] if both else None
        found.append(row)
    return found


def main() -> None:
    """Run both engines and print the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llama3-70b", help="a name in fcsd.bench.shapes, or a checkpoint")
    parser.add_argument("--layers", type=int, default=8, help="of a shape")
    parser.add_argument("--tp", default="1", help="tensor-parallel degrees, as 1,2,4")
    parser.add_argument("--batch", default="1", help="numbers of prompts, as 1,64")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=65)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="a time is the median of so many")
    parser.add_argument("--reduce", default="nccl", help="all-reduce backends of fcsd's engine, as nccl,symmetric")
    parser.add_argument("--attention", help="of decoding steps of fcsd's engine: grouped or split")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing in fcsd's engine; vLLM compiles")
    given = parser.parse_args()
    head: Row = dict(shape=given.shape, layers=given.layers, prompt=given.prompt, new=given.new, dtype=given.dtype)
    head |= dict(attention=given.attention, compile=not given.no_compile)
    begin(head)
    codes = {engine: subprocess.run(command(engine, given), cwd=ROOT).returncode for engine in ("own", "vllm")}
    for row in beside(*(rows_of(given.out / engine / "infer.json") for engine in codes)):
        ended(head | row)
    sys.exit(any(codes.values()))


if __name__ == "__main__":
    main()
