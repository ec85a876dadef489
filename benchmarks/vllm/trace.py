"""Times single steps under vLLM, and says from traces what the host and the GPU do in them.

    python -m benchmarks.vllm trace llama3-8b --layers 16 --tp 2 --out FOLDER

One engine for each of ``WAYS``: the original, and again as the control, the wiring, the wiring with sums in flight
from 256 tokens on, without any in pieces of graphs, and with its sums at once, and its bound. With ``-by-host`` behind
it, a way's sums go through memory of the host. They start at the same time, and take turns, ``--rounds`` times.
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
import os
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.vllm.engines import Failed, ask, forks, llm, measure_host_sums, replies, sampling, version

from fcsd.bench.runner import write
from fcsd.bench.serve.variants import HOST_SUMS

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
BY_HOST = " by host"
STEP = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
SHORT, LONG = 16, 1024  # tokens of the prompts and answers that are decoded meanwhile
PAUSE = 3  # steps of these answers before each prompt


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


ARGUMENTS = {
    "model": dict(help="a name in fcsd.bench.shapes, or a directory with a config.json"),
    "--layers": int,
    "--wiring": "ladder",
    "--tp": 2,
    "--tokens": dict(type=_numbers, default=[256, 512, 544, 768, 1024, 1536, 2048, 4096]),
    "--graphs": dict(type=_numbers, help="tokens of each CUDA graph, instead of vLLM's choice"),
    "--custom": dict(action="store_true", help="let vLLM choose its custom all-reduce, which needs peer access"),
    "--options": dict(type=json.loads, default={}, help="JSON of further arguments of vLLM's LLM"),
    "--prompt": 512,
    "--answers": 28,
    "--rounds": 2,
    "--repeats": dict(type=int, default=10, help="how often a prompt is timed in a turn"),
    "--limit": dict(type=float, default=240.0, help="seconds of a turn, and of the start of all engines"),
    "--ways": dict(
        type=lambda words: words.replace("-", " ").split(","), default=[*WAYS],
        help="some of: " + ",".join(WAYS).replace(" ", "-") + "; each with -by-host, too",
    ),
    "--out": dict(type=Path, required=True),
}  # fmt: skip


def serve(way: str, given: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """One engine, which answers the name of a method of ``Bench`` by what that returns."""
    begun = time.perf_counter()
    bench = Bench(way, given, folder)
    told: Any = {"start_s": round(time.perf_counter() - begun, 1), "chosen": bench.chosen()}
    while True:
        told = getattr(bench, (yield told))()


class Bench:
    """vLLM's engine for one way, step by step."""

    def __init__(self, way: str, given: argparse.Namespace, folder: Path) -> None:
        from fcsd.bench.serve.model import config_of, wiring_for
        from fcsd.bench.serve.running import write_directory
        from fcsd.parallel.all_reduce.ways import PLAIN, VERSION, Way, Ways

        self.given, self.count, self.traces = given, 0, folder.resolve() / "traces"
        config, told = config_of(given.model, given.layers), WAYS[way.removesuffix(BY_HOST)]
        wiring = wiring_for("standard" if told is None else given.wiring, config, given.tp)
        longest = max(*given.tokens, given.prompt, SHORT + LONG) + 8
        model = write_directory(given.model, config, wiring, folder / "model", longest)
        if told is not None and "table" in told:
            once = Way(PLAIN, False)
            rows = Ways(once, ((1, once),), ((1, once),)).to_rows()
            head = {"version": VERSION, "user": "plugin", "tp": given.tp, "wiring": given.wiring}
            told = {"reduce": str(folder / "table.json")}
            (folder / "table.json").write_text(json.dumps({**head, "model": "", "command": "", **rows}))
        self.llm: Any = llm(
            model, load_format="dummy", dtype="bfloat16",
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

    def traced(self) -> dict[str, Any]:
        """What the traces say, by their files."""
        return {trace.name: read(trace) for trace in sorted(self.traces.glob("*.json*"))}

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
        self.count += 1
        prompt = [1 + (self.count + n) % 100 for n in range(tokens)]
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, sampling(new))
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


def main(given: argparse.Namespace) -> bool:
    """Start the engines, give them their turns, and print what they measured; whether one has failed."""
    given.out.mkdir(parents=True, exist_ok=True)
    # Random weights would choose a few experts, and other ones in each way.
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    version()
    found: dict[str, dict[str, Any]] = {way: {"settings": WAYS[way.removesuffix(BY_HOST)]} for way in given.ways}
    environments = {way: HOST_SUMS["host sums"] if way.endswith(BY_HOST) else {} for way in given.ways}
    measure_host_sums({}, [given.tp] if any(environments.values()) else [])
    with TemporaryDirectory(prefix="fcsd-trace-") as scratch, forks() as fork:
        running = {}
        for way in given.ways:
            folder = Path(scratch) / way.replace(" ", "-")
            folder.mkdir()
            log = given.out / f"{folder.name}.log"
            running[way] = fork(serve, way, given, folder, log=log, environment=environments[way])

        def turn(ways: list[str], asked: str | None = None) -> Iterator[tuple[str, Any]]:
            """What these ways reply, if they have not failed, to a request or to their start; all of it is stored."""
            some = {way: running[way] for way in ways if way in running}
            if asked:
                ask(some, asked)
            for way, told in replies(some, time.monotonic() + given.limit):
                if isinstance(told, Failed):
                    found[way]["failed"] = str(told)
                    del running[way]
                else:
                    yield way, told
                write(found[way], given.out / f"{way.replace(' ', '-')}.json")

        for way, told in turn(given.ways):  # all have started, because one that starts would disturb a turn
            found[way] |= told
        for round_ in range(-1, given.rounds):  # one to warm up
            for way in given.ways:
                for _, told in turn([way], "times"):
                    for name, value in told.items() if round_ >= 0 else ():
                        found[way].setdefault(name, []).append(value)
        for way in given.ways:
            list(turn([way], "trace"))
        for way, told in turn(given.ways, "traced"):
            found[way]["traced"] = told
    print(text(found), flush=True)
    return any("failed" in own for own in found.values())
