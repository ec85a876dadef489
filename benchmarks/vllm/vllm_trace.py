"""Says which kernels a decoding step under vLLM runs: of the original, of a wiring, and of a wiring with sums at once.

    python benchmarks/vllm/vllm_trace.py SHAPE --layers 16 --tp 2 --out trace.json

The engines start at the same time, in processes of their own, and take turns: each decodes one answer ``--rounds``
times without a profiler, and once under torch's. Of the trace only the kernels of whole CUDA graphs are read, by the
launch that they belong to; prompts are longer than vLLM's largest graph, so that every launch is one decoding step. Of
rank 0 the result has, for each engine, ``step_ms`` (the wall time of a step in each round), ``graph_us`` (the median
over the steps of the time from the start of a graph's first kernel to the end of its last), ``busy_us`` (the part of it
in which a kernel runs), ``steps``, and ``kernels``: name, calls and µs in a step. Weights are random.
"""

import argparse
import json
import multiprocessing
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

PROMPT, ANSWER, PROFILED = 600, 128, 16  # tokens
WAYS = ("original", "in flight", "at once")


def run(way: str, given: argparse.Namespace, folder: Path, barrier: Any, results: Any) -> None:
    """Start one engine, and put what is measured of it into ``results``, or the error that ended it."""
    try:
        results.put((way, _measure(way, given, folder, barrier)))
    except BaseException as error:
        barrier.abort()
        results.put((way, {"failed": f"{type(error).__name__}: {error}"[:500]}))
        raise


def _measure(way: str, given: argparse.Namespace, folder: Path, barrier: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    from fcsd.bench.serve.model_files import write_directory
    from fcsd.bench.serve.workload import config_of, wiring_for
    from fcsd.parallel.all_reduce.ways import PLAIN, VERSION, Way, Ways

    config = config_of(given.shape, given.layers)
    wiring = wiring_for("standard" if way == "original" else given.wiring, config, given.tp)
    model, traces = write_directory(given.shape, config, wiring, folder / "model", 4096), folder / "traces"
    more: dict[str, Any] = {}
    if way == "at once":
        once = Way(PLAIN["plugin"], False)
        rows = Ways(once, ((1, once),), ((1, once),)).to_rows()
        head = {"version": VERSION, "user": "plugin", "tp": given.tp, "wiring": given.wiring, "model": given.shape}
        (folder / "table.json").write_text(json.dumps({**head, "command": "vllm_trace", **rows}))
        more["additional_config"] = {"fcsd": {"reduce": str(folder / "table.json")}}
    if given.eager:
        more["enforce_eager"] = True
    llm = LLM(
        str(model), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
        tensor_parallel_size=given.tp, enable_expert_parallel=given.ep, max_model_len=2048, max_num_seqs=16,
        gpu_memory_utilization=0.9 / len(given.ways), kv_cache_memory_bytes=1 << 30, disable_custom_all_reduce=True,
        profiler_config=dict(
            profiler="torch", torch_profiler_dir=str(traces.resolve()), torch_profiler_with_stack=False,
            torch_profiler_dump_cuda_time_total=False,
        ),
        **more,
    )  # fmt: skip

    def decode(tokens: int) -> float:
        """Seconds of an answer."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": list(range(1, PROMPT + 1))}], sampling, use_tqdm=False)
        return time.perf_counter() - begun

    def profile() -> None:
        llm.start_profile()
        decode(PROFILED)
        llm.stop_profile()

    decode(ANSWER)
    steps = []
    for round_ in range(given.rounds + 1):
        for turn in given.ways:
            barrier.wait(given.limit)
            if turn == way and round_ < given.rounds:
                steps.append(1e3 * (-decode(1) + decode(ANSWER)) / (ANSWER - 1))
            elif turn == way:
                profile()
    barrier.wait(given.limit)  # an engine that ends would disturb the last turn
    found = sorted(traces.glob("*rank*0*.json*")) or sorted(traces.iterdir())
    return {"step_ms": [round(step, 4) for step in steps], **read(found[0])}


def read(path: Path) -> dict[str, Any]:
    """The kernels of the whole graphs in a trace; see the top of this file."""
    from fcsd.parallel.trace import covered, read_content, union

    events = read_content(path)["traceEvents"]
    launches = {e["args"]["correlation"] for e in events if "GraphLaunch" in e["name"]}
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and event["args"].get("correlation") in launches:
            steps[event["args"]["correlation"]].append(event)
    most = max(map(len, steps.values()), default=0)
    whole = [step for step in steps.values() if len(step) > most / 2]
    spans, busy, calls, spent = [], [], Counter(), Counter()
    for step in whole:
        times = [(e["ts"], e["ts"] + e["dur"]) for e in step]
        begin, end = min(t[0] for t in times), max(t[1] for t in times)
        spans.append(end - begin)
        busy.append(covered(begin, end, union(times)))
        for event in step:
            calls[event["name"][:120]] += 1
            spent[event["name"][:120]] += event["dur"]
    count = max(len(whole), 1)
    kernels = [{"name": n, "calls": calls[n] / count, "us": round(us / count, 2)} for n, us in spent.most_common()]
    middle = {"graph_us": spans, "busy_us": busy}
    return {
        "steps": len(whole),
        **{k: round(median(v), 1) if v else None for k, v in middle.items()},
        "kernels": kernels,
    }


def text(found: dict[str, Any]) -> str:
    """The times, and a line for each kernel whose calls or time differ from the original's by more than a tenth."""
    lines = [f"{way}: { ({k: v for k, v in row.items() if k != 'kernels'}) }" for way, row in found.items()]
    rows = {way: {k["name"]: k for k in row.get("kernels", ())} for way, row in found.items()}
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        cells = [row.get(name, {"calls": 0, "us": 0.0}) for row in rows.values()]
        first = cells[0]
        if any(c["calls"] != first["calls"] or abs(c["us"] - first["us"]) > 0.1 * first["us"] for c in cells):
            lines.append(" | ".join(f"{c['calls']:g} x, {c['us']:g} us" for c in cells) + f" | {name}")
    return "\n".join(lines)


def main() -> None:
    """Start the engines, and write and print what they measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", help="a name in fcsd.bench.shapes, or a directory with a config.json")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--wiring", default="ladder")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without graphs, of which nothing is read then")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--limit", type=float, default=240, help="seconds for which an engine waits for the others")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS, help="some of: " + ",".join(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(given.ways)), context.SimpleQueue()
    with TemporaryDirectory(prefix="fcsd-trace-") as scratch:
        processes = []
        for way in given.ways:
            folder = Path(scratch) / way.replace(" ", "-")
            folder.mkdir()
            processes.append(context.Process(target=run, args=(way, given, folder, barrier, results)))
            processes[-1].start()
        rows = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    found = {way: rows[way] for way in given.ways}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(text(found))
    raise SystemExit(any("failed" in row for row in found.values()))


if __name__ == "__main__":
    main()
