"""Times real runs of ``fcsd distill`` on the bundled teacher and corpus, in bf16 on one GPU, one after the other.

    python benchmarks/distill/time_bundled.py OUT.json [--steps 100] [--seq 1024] [--tokens 32768] NAME[:SETTING,...] ...

NAME names a run in OUT.json, and the settings are ``--set`` assignments, for example ``graph:train.graph=true``. All
runs are in one process and begin with the same weights and rows. OUT.json is written after every run. It holds, for
each run, the tokens per second of its second half, the CPU seconds of its main thread, the last losses, and for every
logged step the share of the time since the line before that was spent waiting for data. ``train.log_every`` sets how
many lines there are.
"""

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from fcsd import convert_checkpoint, load_recipe
from fcsd.bench.out_file import out_file
from fcsd.distill.loop import distill_model
from fcsd.launch.environment import snapshot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=out_file)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("runs", nargs="+", metavar="NAME[:SETTING,...]")
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": snapshot(), "options": vars(options) | {"out": options.out.name}}
    with tempfile.TemporaryDirectory() as folder:
        student = Path(folder, "student")
        convert_checkpoint("assets/teacher", student, wiring="farskip")
        for run in options.runs:
            name, _, settings = run.partition(":")
            try:
                results[name] = timed(student, Path(folder, name), options, [s for s in settings.split(",") if s])
            except Exception as error:  # the next run may work
                traceback.print_exc()
                results[name] = {"error": f"{type(error).__name__}: {error}"}
            options.out.write_text(json.dumps(results, indent=1))
            print(name, json.dumps(results[name]), flush=True)


def timed(student: Path, out: Path, options: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    """Runs the recipe ``tiny`` with these settings, and returns the numbers for OUT.json."""
    sets = [
        f"model={student}",
        "teacher=assets/teacher",
        f"output_dir={out}",
        f"data.seq_len={options.seq}",
        "data.held_out=null",
        f"train.batch_tokens={options.tokens}",
        f"train.micro_batch_size={options.tokens // options.seq}",
        f"train.steps={options.steps}",
        f"train.log_every={options.steps // 2}",
        f"train.dtype={options.dtype}",
        "train.sample_tokens=0",
        *settings,
    ]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began, cpu = time.perf_counter(), time.thread_time()
    distill_model(load_recipe("tiny", sets), resume="never")
    lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return {
        "settings": settings,
        "run_seconds": time.perf_counter() - began,
        "main_thread_seconds": time.thread_time() - cpu,
        "waited_for_data": {line["step"]: line["data_wait"] for line in lines},
        **lines[-1],
    }


if __name__ == "__main__":
    main()
