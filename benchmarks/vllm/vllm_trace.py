"""On which stream vLLM reduces while it serves a converted model, from a trace of its ranks.

    python benchmarks/vllm/vllm_trace.py FOLDER --tp 2

The model is the small qwen2_moe of ``benchmarks/vllm/vllm_cases.py``, ``farskip`` in layers 1 to 3, made in FOLDER.
Every step is overlapped (``overlap_from`` 0), without CUDA graphs. The main stream is the one with most of the
computation. The reductions on it must be those that nothing covers: that of the embedding, those of layers that are not
converted, and those of which the plan says that they are complete at once. All others have to be on another stream. A
row for each rank has their numbers, and the share of the time of the others during which the main stream computes. The
exit status is 0 if every rank has the numbers of the plan. ``benchmarks/vllm/vllm_gpu.sh two`` runs this.
"""

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks/vllm")]

from vllm_cases import made, prompts  # noqa: E402
from vllm_parity import engine, release  # noqa: E402
from vllm_report import Row, report  # noqa: E402

CASE, NEW = "qwen2_moe-farskip", 8
REDUCTION = re.compile(r"AllReduce|cross_device_reduce|one_shot|two_shot|all_reduce", re.IGNORECASE)


def planned(path: Path) -> tuple[int, int]:
    """How many reductions one step of a converted MoE model has on the main stream, and on the other one."""
    from fcsd.models.schedule import layer_plans
    from fcsd.models.wiring_block import Wiring

    config = json.loads((path / "config.json").read_text())
    layers = config["num_hidden_layers"]
    plans = layer_plans(Wiring.from_block(config["fcsd"]), ["moe-shared"] * layers, range(layers))
    steps = [step.then for plan in plans.values() for step in plan.steps]
    of_vllm = 2 * (layers - len(plans)) + 1  # two in each layer that vLLM's own code runs, and one of the embedding
    return of_vllm + steps.count("now"), steps.count("start")


def streams(events: list[dict[str, Any]]) -> Row:
    """The reductions of one rank by their stream, from the events of its trace.

    Returns: ``main`` and ``side``, the numbers of reductions on the main stream and on others; ``hidden``, the share
        of the time of the latter during which the main stream computes.

    Raises:
        ValueError: no kernel ran on a GPU.
    """
    from fcsd.parallel.trace import covered, union

    kernels = [event for event in events if event.get("cat") == "kernel"]
    computation: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in kernels:
        if not REDUCTION.search(event["name"]):
            computation[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
    if not computation:
        raise ValueError("the trace has no kernel of a GPU")
    main = max(computation, key=lambda stream: sum(end - start for start, end in computation[stream]))
    found = [event for event in kernels if REDUCTION.search(event["name"])]
    side = [(event["ts"], event["ts"] + event["dur"]) for event in found if event["args"]["stream"] != main]
    busy = union(computation[main])
    whole = sum(end - start for start, end in side)
    hidden = sum(covered(start, end, busy) for start, end in side) / whole if whole else 0.0
    return dict(main=len(found) - len(side), side=len(side), hidden=hidden)


def traced(folder: Path, ranks: int, traces: Path) -> None:
    """Let vLLM answer the prompts of the case once to warm up, and once more under its profiler."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    paths = made(folder, CASE)
    profiler = dict(profiler="torch", torch_profiler_dir=str(traces.resolve()), torch_profiler_with_stack=False)
    llm = engine(
        paths["converted"], "bfloat16", max_model_len=256, max_num_seqs=8, enforce_eager=True,
        tensor_parallel_size=ranks, additional_config={"fcsd": {"overlap_from": 0}}, profiler_config=profiler,
    )  # fmt: skip
    asked = [{"prompt_token_ids": ids} for ids in prompts(paths["original"], CASE)]
    sampling = SamplingParams(max_tokens=NEW, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate(asked, sampling, use_tqdm=False)
    llm.start_profile()
    llm.generate(asked, sampling, use_tqdm=False)
    llm.stop_profile()
    del llm
    release()


def judged(events: list[dict[str, Any]], main: int, side: int) -> Row:
    """``streams``, and whether the numbers are those of a whole number of steps with ``main`` and ``side`` each."""
    found = streams(events)
    steps = found["side"] // side
    return found | dict(steps=steps, right=steps > 0 and (found["main"], found["side"]) == (steps * main, steps * side))


def main() -> None:
    """Trace the model, and report a row for each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the model and the traces are written")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    given = parser.parse_args()
    traces = given.folder / f"traces-tp{given.tp}"
    head: Row = dict(traced=CASE, ranks=given.tp)
    rows = [report(head, lambda: (traced(given.folder, given.tp, traces), {})[1])]
    main_, side = planned(made(given.folder, CASE)["converted"])
    for file in sorted(traces.rglob("*.json.gz")):
        with gzip.open(file, "rt") as source:
            events = json.load(source)["traceEvents"]
        if any(event.get("cat") == "kernel" for event in events):  # not the process that only hands requests on
            rows.append(report(head | dict(file=file.name), judged, events, main_, side))
    print(f"{len(rows) - 1} ranks were traced", flush=True)
    sys.exit(len(rows) != given.tp + 1 or not all(row.get("right", True) for row in rows))


if __name__ == "__main__":
    main()
