"""Times single steps under vLLM, and says from traces what the host and the GPU do in them.

    python benchmarks/vllm/vllm_trace.py llama3-8b --layers 16 --tp 2 --out FOLDER

One engine for each of ``WAYS``: the original, and again as the control, the wiring, the wiring with sums in flight
from 256 tokens on, without any in pieces of graphs, and with its sums at once, and its bound. They start at the same
time, in processes of their own, and take turns, ``--rounds`` times.
FOLDER gets a file for each, written again after each turn. All times are ms:

- ``single``: for each number of tokens, the median times from a prompt to its only token. Nothing else runs;
- ``mixed``: the same for prompts of ``--prompt`` tokens that come one at a time while ``--answers`` are decoded;
- ``decode``: a step of these answers;
- ``traced``: for each rank, the medians over the steps of one kind, which are named "prompts' tokens+answers". See
  ``read``. The profiler makes the host slower.

Up to 512 tokens vLLM has CUDA graphs by default, or up to the last of ``--graphs``. Larger steps, and those with sums
in flight and prompts, wait for the host. Weights are random, tokens are routed evenly to experts, and prefix caching
is off.
"""

import argparse
import json
import multiprocessing
import os
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

# What the plugin is told; None is the original, and a table of the same way for all sizes is written for "at once".
WAYS: dict[str, dict[str, Any] | None] = {
    "original": None,
    "original again": None,
    "wired": {},
    "from 256 tokens": {"overlap_from": 256},
    "no pieces": {"pieces": False},
    "at once": {"table": True},
    "bound": {"reduce": "none"},
}
STEP = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
SHORT, LONG = 16, 1024  # tokens of the prompts and answers that are decoded meanwhile
PAUSE = 3  # steps of these answers before each prompt


def run(way: str, given: argparse.Namespace, folder: Path, barrier: Any, done: Any) -> None:
    """Start one engine, take its turns, and write what is measured, or the error that ended it; then release ``done``.

    An engine that fails still waits for the others in its turns, so that it does not end them.
    """
    found: dict[str, Any] = {"settings": WAYS[way]}
    file = given.out / f"{way.replace(' ', '-')}.json"
    bench: Bench | None = None
    for round_ in range(-2, given.rounds + 1):  # one to start, one to warm up, and the last is traced
        for turn in given.ways:
            barrier.wait(given.limit)  # an engine that starts or ends would disturb a turn
            if "failed" in found or (turn != way if round_ > -2 else turn != given.ways[0]):
                continue
            try:
                if bench is None:
                    begun = time.perf_counter()
                    bench = Bench(way, given, folder)
                    found |= {"start_s": round(time.perf_counter() - begun, 1), "chosen": bench.chosen()}
                elif round_ == given.rounds:
                    bench.trace()
                else:
                    for name, value in bench.times().items() if round_ >= 0 else ():
                        found.setdefault(name, []).append(value)
            except BaseException as error:
                found["failed"] = f"{type(error).__name__}: {error}"[:500]
            file.write_text(json.dumps(found, indent=1) + "\n")
    barrier.wait(given.limit)
    if "failed" not in found and bench is not None:
        found["traced"] = {trace.name: read(trace) for trace in sorted(bench.traces.glob("*.json*"))}
        file.write_text(json.dumps(found, indent=1) + "\n")
    done.release()
    if bench is not None:
        bench.engine.engine_core.shutdown()  # or this process would wait for the engine's, which nothing else ends
    raise SystemExit("failed" in found)


class Bench:
    """vLLM's engine for one way, step by step."""

    def __init__(self, way: str, given: argparse.Namespace, folder: Path) -> None:
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        from fcsd.bench.serve.model import config_of, wiring_for
        from fcsd.bench.serve.running import write_directory
        from fcsd.parallel.all_reduce.ways import PLAIN, VERSION, Way, Ways

        self.given, self.count, self.traces = given, 0, folder.resolve() / "traces"
        config, told = config_of(given.model, given.layers), WAYS[way]
        wiring = wiring_for("standard" if told is None else given.wiring, config, given.tp)
        longest = max(*given.tokens, given.prompt, SHORT + LONG) + 8
        model = write_directory(given.model, config, wiring, folder / "model", longest)
        if told is not None and "table" in told:
            once = Way(PLAIN, False)
            rows = Ways(once, ((1, once),), ((1, once),)).to_rows()
            head = {"version": VERSION, "user": "plugin", "tp": given.tp, "wiring": given.wiring}
            told = {"reduce": str(folder / "table.json")}
            (folder / "table.json").write_text(json.dumps({**head, "model": "", "command": "", **rows}))
        self.llm: Any = LLM(
            str(model), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
            tensor_parallel_size=given.tp, max_model_len=longest, max_num_batched_tokens=8192,
            gpu_memory_utilization=0.9 / len(given.ways), kv_cache_memory_bytes=3 << 29,
            disable_custom_all_reduce=not given.custom,
            additional_config={"fcsd": told} if told else {},
            compilation_config={"cudagraph_capture_sizes": given.graphs} if given.graphs else {},
            profiler_config=dict(
                profiler="torch", torch_profiler_dir=str(self.traces), torch_profiler_with_stack=False,
                torch_profiler_dump_cuda_time_total=False,
            ),
            **given.options,
        )  # fmt: skip
        self.engine = self.llm.llm_engine

    def chosen(self) -> dict[str, Any]:
        """What vLLM has chosen by itself, which should be the same for all ways."""
        config = self.engine.vllm_config
        compilation, scheduler = config.compilation_config, config.scheduler_config
        return {
            "v2_runner": getattr(config, "use_v2_model_runner", None),
            "mode": str(compilation.mode),
            "graphs": str(compilation.cudagraph_mode),
            "largest_graph": compilation.max_cudagraph_capture_size,
            "split": compilation.splitting_ops,
            "async": scheduler.async_scheduling,
            "sequences": scheduler.max_num_seqs,
            "tokens": scheduler.max_num_batched_tokens,
        }

    def times(self) -> dict[str, Any]:
        """``single``, ``mixed`` and ``decode`` of one turn."""
        repeats = range(self.given.repeats)
        single = {tokens: median(self.first(tokens) for _ in repeats) for tokens in self.given.tokens}
        mixed, decode = self.mixed(2 * self.given.repeats, 96)
        return {"single": single, "mixed": mixed, "decode": decode}

    def trace(self) -> None:
        """Write a trace of a few steps."""
        self.llm.start_profile()
        self.mixed(8, 24)
        self.llm.stop_profile()

    def first(self, tokens: int) -> float:
        """Milliseconds from a prompt to its only token."""
        begun = time.perf_counter()
        name = self._add(tokens, 1)
        while not any(out.request_id == name and out.finished for out in self.engine.step()):
            pass
        return 1e3 * (time.perf_counter() - begun)

    def mixed(self, prompts: int, steps: int) -> tuple[float, float]:
        """The median ``first`` of prompts that come while answers are decoded, and ms of a step of the answers."""
        names = [self._add(SHORT, LONG) for _ in range(self.given.answers)]
        begun: set[str] = set()
        while len(begun) < len(names):
            begun |= {out.request_id for out in self.engine.step()}
        times = []
        for _ in range(prompts):
            for _ in range(PAUSE):
                self.engine.step()
            times.append(self.first(self.given.prompt))
        since = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        step = 1e3 * (time.perf_counter() - since) / steps
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return median(times), step

    def _add(self, tokens: int, new: int) -> str:
        """Send a prompt of ``tokens`` tokens; returns the name of the request."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        self.count += 1
        prompt = [1 + (self.count + n) % 100 for n in range(tokens)]
        sampling = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, sampling)
        return str(self.count)


def read(path: Path) -> dict[str, Any]:
    """What one rank did in the steps of each kind that a trace has three times or more; medians, in ms.

    ``period`` from a step's start to that of the next; ``host`` until the host has launched the model; ``gpu`` from the
    start of its first kernel to the end of its last; ``busy`` of it with any kernel; ``exposed`` with NCCL's alone;
    ``behind`` from the host's end to the GPU's, which is large where the host is ahead; ``nccl`` by stream; and counts
    of ``kernels``, ``launches``, ``graphs``. ``operators`` are calls and ms on the host of operators of vLLM and fcsd.
    ``named`` has the kernels of the middle one of these steps by their time: name, calls and µs.
    """
    from fcsd.parallel.trace import covered, read_content, union

    events = [e for e in read_content(path)["traceEvents"] if e.get("ph") == "X"]
    steps = sorted((e for e in events if e.get("cat") == "user_annotation" and STEP.search(e["name"])), key=_start)
    kernels: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            kernels[event["args"].get("correlation", -1)].append(event)
    host = sorted((e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver", "cpu_op")), key=_start)
    starts = [_start(event) for event in host]
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step, later in zip(steps, [*steps[1:], None], strict=True):
        found = STEP.search(step["name"])
        assert found is not None
        begin, end = _start(step), _start(step) + step["dur"]
        inside = [
            e for e in host[bisect_left(starts, begin) : bisect_left(starts, end)] if e.get("tid") == step.get("tid")
        ]
        calls = [e for e in inside if e["cat"] != "cpu_op" and e["args"].get("correlation") in kernels]
        run_ = [kernel for call in calls for kernel in kernels[call["args"]["correlation"]]]
        row: dict[str, Any] = {"host": step["dur"], "launches": len(calls), "kernels": len(run_)}
        row["graphs"] = sum("GraphLaunch" in call["name"] for call in calls)
        if later is not None:
            row["period"] = _start(later) - begin
        if run_:
            first, last = min(map(_start, run_)), max(_start(k) + k["dur"] for k in run_)
            sums = [k for k in run_ if "nccl" in k["name"].lower()]
            busy = covered(first, last, union([(_start(k), _start(k) + k["dur"]) for k in run_]))
            rest = [(_start(k), _start(k) + k["dur"]) for k in run_ if "nccl" not in k["name"].lower()]
            row |= {"gpu": last - first, "busy": busy, "behind": last - end}
            row["exposed"] = busy - covered(first, last, union(rest))
            row["nccl"] = Counter()
            for kernel in sums:
                row["nccl"][str(kernel["args"].get("stream"))] += kernel["dur"]
        row["named"] = run_
        row["operators"] = Counter()
        for event in inside:
            if event["cat"] == "cpu_op" and event["name"].startswith(("fcsd::", "vllm::")):
                row["operators"][event["name"]] += event["dur"]
                row["operators"][f"{event['name']} calls"] += 1
        rows[f"{found[2]}+{found[3]}"].append(row)
    found_: dict[str, Any] = {}
    for kind, own in rows.items():
        named = [row.pop("named") for row in own]
        if len(own) >= 3:
            middle = sorted(range(len(own)), key=lambda n, own=own: own[n].get("gpu", 0))[len(own) // 2]
            found_[kind] = {"steps": len(own), **_medians(own), "named": _named(named[middle])}
    return found_


def _named(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls, spent = Counter(), Counter()
    for kernel in kernels:
        calls[kernel["name"][:120]] += 1
        spent[kernel["name"][:120]] += kernel["dur"]
    return [{"name": name, "calls": calls[name], "us": round(us, 2)} for name, us in spent.most_common()]


def _start(event: dict[str, Any]) -> float:
    return event["ts"]


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each field; times from µs to ms."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        if isinstance(values[0], Counter):
            names = dict.fromkeys(name for value in values for name in value)
            found[key] = _medians([{name: value[name] for name in names} for value in values])
        else:
            count = key in ("launches", "kernels", "graphs") or key.endswith("calls")
            found[key] = round(median(values) / (1 if count else 1e3), 3)
    return found


def text(found: dict[str, dict[str, Any]]) -> str:
    """For each time of a step the ms of each way, with its speed over the first one."""
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for way, own in found.items():
        for tokens in (own.get("single") or [{}])[0]:
            rows[f"single {tokens}"][way] = median(round_[tokens] for round_ in own["single"])
        for key in ("mixed", "decode"):
            if own.get(key):
                rows[key][way] = median(own[key])
        for kinds in list(own.get("traced", {}).values())[:1]:
            for kind, fields in kinds.items():
                for key in ("period", "host", "gpu", "busy", "exposed", "behind"):
                    if key in fields:
                        rows[f"traced {kind} {key}"][way] = fields[key]
    first = next(iter(found))
    lines = [f"ms | {' | '.join(found)}"]
    for name, own in rows.items():
        cells = [
            "-" if way not in own else f"{own[way]:.3f} ({own.get(first, 0) / own[way] if own[way] else 0:.2f}x)"
            for way in found
        ]
        lines.append(f"{name} | {' | '.join(cells)}")
    return "\n".join([*lines, *(f"{way} failed: {own['failed']}" for way, own in found.items() if "failed" in own)])


def main() -> None:
    """Start the engines, and print what they measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a name in fcsd.bench.shapes, or a directory with a config.json")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--wiring", default="ladder")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=_numbers, default=[256, 512, 544, 768, 1024, 1536, 2048, 4096])
    parser.add_argument("--graphs", type=_numbers, help="tokens of each CUDA graph, instead of vLLM's choice")
    parser.add_argument(
        "--custom", action="store_true", help="let vLLM choose its custom all-reduce, which needs peer access"
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help='JSON of further arguments of vLLM\'s LLM: {"quantization": "fp8"}',
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="how often a prompt is timed in a turn")
    parser.add_argument("--limit", type=float, default=240, help="seconds for which an engine waits for the others")
    parser.add_argument("--ways", type=_ways, default=[*WAYS], help="some of: " + ",".join(WAYS).replace(" ", "-"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    # Random weights would choose a few experts, and other ones in each way.
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    context = multiprocessing.get_context("spawn")
    barrier, done = context.Barrier(len(given.ways)), context.Semaphore(0)
    with TemporaryDirectory(prefix="fcsd-trace-") as scratch:
        processes = []
        for way in given.ways:
            folder = Path(scratch) / way.replace(" ", "-")
            folder.mkdir()
            processes.append(context.Process(target=run, args=(way, given, folder, barrier, done)))
            processes[-1].start()
        for _ in processes:
            while not done.acquire(timeout=1) and any(process.is_alive() for process in processes):
                pass
        files = {way: given.out / f"{way.replace(' ', '-')}.json" for way in given.ways}
        print(text({way: json.loads(file.read_text()) for way, file in files.items() if file.exists()}), flush=True)
        for process in processes:
            process.join(15)  # an engine's end can hang
            process.kill()
            process.join()
    raise SystemExit(any(process.exitcode for process in processes))


def _ways(text_: str) -> list[str]:
    return text_.replace("-", " ").split(",")


def _numbers(text_: str) -> list[int]:
    return [int(word) for word in text_.split(",")]


if __name__ == "__main__":
    main()
