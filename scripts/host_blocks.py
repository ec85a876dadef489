"""The generated blocks about what GPUs send through memory of the host; see ``scripts/page_blocks.py``."""

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.comm.transports import WIDTH, uneven
from benchmarks.turns import spread

from fcsd.markdown import table

RESULTS = Path("benchmarks/results")
_TABLES, _TURNS = "host_tables_2xh200.json", "vllm_turns_8b_2xh200.json"
_OTHERS, _SERVED = "vllm_turns_int4_and_experts_2xh200.json", "serve_vllm_8b_host_sums_slow_2xh200.json"
_TRAINED, _DISTILLED = "train_v2lite_by_host_slow_2xh200.json", "distill_v2lite_by_host_slow_2xh200.json"
_SHARDED, _WIDE = "tp_by_host_graphs_2xh200.json", "divide_70b_2xh200.txt"
_STEPPED, _IN_FLIGHT = "vllm_steps_by_host_slow_2xh200.json", "vllm_steps_in_flight_by_host_slow_2xh200.json"
_IN_FLIGHT_BEFORE = "vllm_steps_in_flight_by_host_before_slow_2xh200.json"
_STRESS = {
    "host_sums_stress_2xh200.json": "two GPUs, in graphs",
    "host_sums_stress_4xh200.json": "four GPUs, in graphs",
    "host_sums_stress_eager_2xh200.json": "two GPUs, one by one",
    "host_sums_stress_streams_1xh200.json": "two streams of one GPU",
    "host_sums_stress_processes_1xh200.json": "two processes on one GPU",
}
# The ways of tensor parallelism of the run at 70B's width in which nothing went over NVLink, and their bound.
_WIDE_WAYS = {
    "standard, own-weights": "tp-off: standard, own-weights, nccl",
    "ladder, overlapped": "tp-off: ladder, on, nccl",
    "ladder, by-host": "tp-off: ladder, on, host",
    "ladder, bound": "tp-on: ladder, off, none",
}


def host_blocks(root: Path) -> dict[str, dict[str, str]]:
    """The text of each block by its name, by page."""
    folder = root / RESULTS
    return {
        "docs/parallel.md": {"by host": by_host(folder)},
        "benchmarks/results/all_reduce.md": {
            "turns": turns(folder, _TURNS, "stock"),
            "turns again": turns(folder, "vllm_turns_8b_again_2xh200.json", "stock"),
            "turns once": turns(folder, "vllm_turns_8b_one_round_2xh200.json", "stock"),
            "turns with int4": turns(folder, _OTHERS, "llama3-8b:32:w4a16, stock"),
            "turns with 70b in int4": turns(folder, "vllm_turns_70b_int4_2xh200.json", "stock"),
            "turns with 70b in fp8": turns(folder, "vllm_turns_70b_fp8_2xh200.json", "stock"),
            "turns with experts": turns(folder, "vllm_turns_qwen3_experts_2xh200.json", "stock"),
            "turns with experts in int4": turns(folder, "vllm_turns_qwen3_int4_2xh200.json", "stock"),
            "turns with v2-lite": turns(folder, "vllm_turns_v2lite_2xh200.json", "stock"),
            "turns with gpt-oss-20b": turns(folder, "vllm_turns_gpt_oss_20b_2xh200.json", "stock"),
            "turns with gpt-oss-120b": turns(folder, "vllm_turns_gpt_oss_120b_2xh200.json", "stock"),
            "turns with llama-4-scout": turns(folder, "vllm_turns_scout_fp8_2xh200.json", "stock"),
            "turns of four": turns(folder, "vllm_turns_70b_tp4_4xh200.json", "stock"),
            "copies": copies(folder),
            "served by host sums": served(folder),
            "host sums": host_sums(folder),
            "stress": stress(folder),
            "graphs": graphs(folder),
            "products": products(folder),
            "steps": steps(folder),
            "eager": eager(folder),
            "started": started(folder),
            "one kernel": one_kernel(folder),
            "one channel": one_channel(folder),
            "fences": fences(folder),
        },
        "benchmarks/results/vllm_load.md": {
            "arrivals by host sums": arrivals(folder),
            "steps by host": steps_one_by_one(folder, _STEPPED),
            "in flight by host, before": steps_one_by_one(folder, _IN_FLIGHT_BEFORE),
            "in flight by host": steps_one_by_one(folder, _IN_FLIGHT),
            "launched": launched(folder),
        },
        "benchmarks/results/overlap.md": {"rows by host": rows_by_host(folder), "steps by host": steps_by_host(folder)},
        "benchmarks/results/engine.md": {"tp 4": served_by_four(folder)},
        "benchmarks/results/tensor_parallel.md": {
            "sums by host": sums_by_host(folder),
            "four ranks": four_ranks(folder),
        },
        "benchmarks/results/LOG.md": {"divided": divided(folder)},
    }


def turns(folder: Path, file: str, base: str) -> str:
    """How many times as fast as one engine of `benchmarks.vllm turns` each other of its shape was, by medians."""
    shape = base.rpartition(", ")[0]
    found = {n: row for n, row in _read(folder, file)["milliseconds"].items() if n.startswith(shape)}
    times = {name: {what: statistics.median(row[what]) for what in row} for name, row in found.items()}
    body = [
        [name.removeprefix(f"{shape}, "), *(f"{times[base][what] / time:.2f}x" for what, time in row.items())]
        for name, row in times.items()
        if name != base
    ]
    return _table(["", *times[base]], body)


def host_sums(folder: Path) -> str:
    """Microseconds of sums through the host beside NCCL's, of two ranks and of four."""

    def read(file: str) -> dict[str, dict[str, float]]:
        raw = _read(folder, file)
        return raw.get("microseconds") or raw["sums"]

    def beside(row: dict[str, float], *ways: str) -> str:
        times = [row[way] for way in ways if way in row]
        return f"{min(times):.1f} ({row['stock'] / min(times):.2f}x)" if times else ""

    exact, int8, body = ("one_shot", "in_blocks", "exchange"), ("in_blocks:int8", "exchange:int8"), []
    coded, four = read("host_sums_2xh200.json"), read("host_sums_4xh200.json")
    for size, own in (coded | read(_TABLES)).items():
        int4 = beside(coded[size], "exchange:int4")
        cells = [f"{own['stock']:.1f}", beside(own, *exact), beside(own, *int8), int4]
        row = four[size]
        cells += [f"{row['stock']:.1f}", beside(row, *exact), beside(row, *int8), beside(row, "exchange:int4")]
        body.append([_bytes(int(size)), *cells])
    ways = ["exact", "INT8", "INT4"]
    return _table(["bytes of a rank", "NCCL, 2 ranks", *ways, "NCCL, 4 ranks", *ways], body)


def served(folder: Path) -> str:
    """Milliseconds of servers by ``fcsd bench serve``, and how many times as fast as stock by NCCL."""
    rounds = {name: one["rounds"] for name, one in _read(folder, _SERVED)["variants"].items()}
    times = {name: {what: statistics.median(ms) for what, ms in row.items()} for name, row in rounds.items()}
    stock = times["original"]
    body = [
        [
            name,
            *(f"{ms:.1f} ({stock[what] / ms:.2f}x)" if name != "original" else f"{ms:.1f}" for what, ms in row.items()),
        ]
        for name, row in times.items()
    ]
    heads = {"decode": "step of {}, ms", "prefill": "first token after {}, ms", "peak": "request at the peak, ms"}
    return _table(["", *(heads[what.split()[0]].format(what.split()[1]) for what in stock)], body)


def copies(folder: Path) -> str:
    """GB/s of each GPU that copies to or from memory of the host while others do the same."""
    raw = _read(folder, "copies_beside_each_other_4xh200.json")  # of a form without a command or "GB/s" around it
    body = []
    for count in (1, 2, 3, 4):
        rows = [row for gpus, row in raw.items() if len(re.findall(r"\d", gpus)) == count]
        means = (statistics.mean(row[way] for row in rows) for way in ("up", "down", "both"))
        body.append([str(count), *(f"{mean:.1f}" for mean in means)])
    return _table(["GPUs at once", "to the GPU, GB/s each", "from it", "each way, both at once"], body)


def eager(folder: Path) -> str:
    """Microseconds of the GPU and of the host together for sums that the host starts one by one, of two ranks."""
    body = []
    for size, row in sorted(_read(folder, _TABLES)["eager"].items(), key=lambda one: int(one[0])):
        if int(size) > 8 << 20:
            continue  # where a table has the GPU's time alone since
        exact = min(row[way] for way in ("one_shot", "in_blocks", "exchange") if way in row)
        int8 = [row[way] for way in ("in_blocks:int8", "exchange:int8") if way in row]
        body.append([_bytes(int(size)), f"{row['stock']:.0f}", f"{exact:.0f}", f"{min(int8):.0f}" if int8 else ""])
    return _table(["bytes of a rank", "NCCL", "host, exact", "INT8"], body)


def started(folder: Path) -> str:
    """Microseconds in which the host starts one sum in flight, before and after two ranks exchanged by addresses."""
    raw = _read(folder, "host_starts_2xh200.json")
    body = []
    for size, row in raw["after"].items():
        times = [raw["before"][size]["exchange flying host"], row["exchange flying host"], row["stock flying host"]]
        body.append([f"{size} MiB", *(f"{time:.0f}" for time in times)])
    busy = raw["both, in vLLM, six engines"]
    alone = raw["after, in vLLM"]
    for size in ("16", "32"):
        what = f"start {size}"
        body.append(
            [f"{size} MiB, in vLLM, three engines", "", *(f"{alone[way][what]['median']:.0f}" for way in alone)]
        )
        times = [f"{busy[when][what]['median']:.0f}" for when in ("before", "after")]
        body.append([f"{size} MiB, in vLLM, six engines", *times, ""])
    return _table(["bytes of a rank", "exchange, before", "exchange", "NCCL"], body)


def one_channel(folder: Path) -> str:
    """Microseconds of NCCL with one channel, and how many times as fast sums through the host were, of two ranks."""
    body = []
    for size, row in _read(folder, "host_sums_one_channel_2xh200.json")["microseconds"].items():
        exact = min(row[way] for way in ("one_shot", "in_blocks", "exchange") if way in row)
        cells = [f"{row['stock']:.1f}", f"{row['stock'] / exact:.2f}x"]
        for format in ("int8", "int4"):
            times = [time for way, time in row.items() if way.endswith(f":{format}")]
            cells.append(f"{row['stock'] / min(times):.2f}x" if times else "")
        body.append([_bytes(int(size)), *cells])
    return _table(["bytes of a rank", "NCCL, one channel, µs", "exact", "INT8", "INT4"], body)


def fences(folder: Path) -> str:
    """Microseconds of kernels in blocks with fences of all threads and without, of two ranks; medians of four turns."""
    body = []
    for name, forms in _read(folder, "host_sums_fences_2xh200.json").items():
        if name.startswith("in_blocks"):
            way, _, size = name.partition(" ")
            times = [forms[form][1] for form in ("now", "bare")]
            own = "INT8" if "int8" in way else "exact"
            body.append([f"{size}, {own}", *(f"{time:.1f}" for time in times), f"{times[0] / times[1]:.2f}x"])
    return _table(["bytes of a rank", "all threads fence", "none does", "gain"], body)


def arrivals(folder: Path) -> str:
    """Servers under random arrivals: each figure in ms, and how many times as fast as the first of its load and run."""
    body = []
    for run, file in (
        ("first", "serve_vllm_load_8b_host_sums_slow_2xh200.json"),
        ("second", "serve_vllm_load_8b_host_sums_again_slow_2xh200.json"),
        ("larger graphs", "serve_vllm_load_8b_host_sums_graphs_slow_2xh200.json"),
    ):
        loads: dict[str, dict[str, dict[str, float]]] = {}
        for name, one in _read(folder, file)["variants"].items():
            for load, row in one["loads"].items():
                loads.setdefault(load, {})[name] = row
        for load, rows in loads.items():
            for name, row in rows.items() if len(rows) > 1 else ():
                whats = "first_p50", "first_p99", "token_p50", "token_p99"
                cells = [f"{row[what]:.1f} ({rows['original'][what] / row[what]:.2f}x)" for what in whats]
                body.append([f"{run}, {load}, {name}", *cells])
    return _table(["run, load, server", "TTFT p50, ms", "p99", "step p50, ms", "p99"], body)


def steps_one_by_one(folder: Path, file: str) -> str:
    """Milliseconds to the only token of a prompt by engines that took turns; see ``benchmarks.vllm trace``."""
    engines = _stepped(folder, file)
    prompt = next(kind for trace in engines["original"]["traced"].values() for kind in trace if kind[0] != "0")
    times = {
        name: {
            f"{tokens} tokens": statistics.median(turn[tokens] for turn in one["single"]) for tokens in one["single"][0]
        }
        | {
            f"{prompt.replace('+', ', beside ')} answers": statistics.median(one["mixed"]),
            "28 answers": statistics.median(one["decode"]),
        }
        for name, one in engines.items()
    }
    first = times["original"]
    body = [[what, *(f"{row[what]:.1f} ({first[what] / row[what]:.2f}x)" for row in times.values())] for what in first]
    return _table(["ms", *times], body)


def launched(folder: Path) -> str:
    """What the hosts of both ranks did in the traced step of a prompt beside answers."""
    attention, sums = "vllm::unified_attention_with_output", "vllm::all_reduce"
    body = []
    for name, one in _stepped(folder, _STEPPED).items():
        ranks = [one["traced"][trace]["512+28"] for trace in sorted(one["traced"])]
        both = [[rank["host"], rank["operators"][attention], rank["operators"][sums]] for rank in ranks]
        cells = [" and ".join(f"{row[n]:.1f}" for row in both) for n in range(3)]
        plain = name.startswith("original")
        shares = " and ".join(f"{row[2] / row[1]:.2f}" for row in both) if plain else ""
        body.append([name, *cells[:2], cells[2] if plain else "", shares])
    return _table(["ms on rank 0 and 1", "the step's launches", "of attention", "of sums", "sums over attention"], body)


def _stepped(folder: Path, file: str) -> dict[str, Any]:
    found = {name.replace("-", " "): one for name, one in _read(folder, file).items()}
    order = ("original", "original again", "original by host", "wired", "wired by host")
    return {name.replace("wired", "ladder"): found[name] for name in order if name in found}


def stress(folder: Path) -> str:
    """How many random sums were made, and how many values of them were wrong."""
    body = []
    for file, where in _STRESS.items():
        raw = _read(folder, file)
        body.append([where, f"{raw['sums']:,}", f"{raw['wrong values']}", f"[raw]({file})"])
    return _table(["ranks", "random sums", "wrong values", "from"], body)


def graphs(folder: Path) -> str:
    """Microseconds of the GPU and of the host for exchanges that start part by part and as one graph."""
    found: dict[tuple[str, str], dict[str, list[tuple[int, int]]]] = {}
    for line in (folder / "host_sums_started_as_graphs_2xh200.txt").read_text().splitlines():
        size, sums, way, _, gpu, _, host = line.split()
        found.setdefault((size, sums), {}).setdefault(way, []).append((int(gpu), int(host)))
    body = []
    for (size, sums), ways in found.items():
        times = [statistics.mean(times) for way in ("direct", "graph") for times in zip(*ways[way], strict=True)]
        body.append([f"{size} MiB, {sums}", *(f"{time:.0f}" for time in times)])
    return _table(["bytes of a rank", "part by part", "of the host", "as a graph", "of the host"], body)


def products(folder: Path) -> str:
    """Milliseconds of matrix products alone, and beside sums."""
    times = _read(folder, "host_sums_2xh200.json")["products, ms"]
    body = [[name, f"{time:.2f}", f"{time / times['nothing'] - 1:.1%}"] for name, time in times.items()]
    return _table(["sums beside the products", "products, ms", "longer by"], body)


def steps(folder: Path) -> str:
    """Milliseconds of a decoding step's products beside sums in flight, by way, blocks and threads of their kernels."""
    raw = _read(folder, "sums_beside_steps_2xh200.json")
    found, alone = raw["milliseconds of a step"], raw["microseconds alone"]
    body = []
    for name in dict.fromkeys(name for row in found.values() for name in row):
        cells = [name]
        for answers, row in found.items():
            with_it = name in row and name != "nothing"
            cells += [f"{row[name]:.2f}" if name in row else "", f"{alone[answers][name]:.1f}" if with_it else ""]
        body.append(cells)
    return _table(["sums", *(head for n in found for head in (f"{n} answers, ms", "a sum alone, µs"))], body)


def one_kernel(folder: Path) -> str:
    """Microseconds of the kernels of `symmetric` beside the one before and NCCL."""
    raw = _read(folder, "symmetric_one_kernel_2xh200.json")["us"]
    columns = ("nccl", "old", "new", "one_shot 64", "in_blocks 64")
    body = [
        [_bytes(size), *(f"{raw[str(size)][name]:.1f}" if name in raw[str(size)] else "" for name in columns)]
        for size in sorted(map(int, raw))
        if size & (size - 1) == 0
    ]
    return _table(
        ["bytes of a rank", "NCCL", "old kernel", "new, as timed", "one shot, 64 blocks", "in blocks, 64"], body
    )


def rows_by_host(folder: Path) -> str:
    """The transports alone and beside matrix products."""
    raw = _read(folder, "transports_by_host_slow_2xh200.json")
    body = []
    for size, ways in raw["ms"].items():
        away = sum(uneven(raw["world"], raw["rows"][size])[0][1:])
        for name, ms in ways.items():
            speed = away * WIDTH * 2 / ms["alone"] / 1e6
            times = [f"{ms[part]:.2f}" for part in ("products", "both")]
            body.append([f"{size}, {name}", f"{ms['alone']:.3f}", f"{speed:.1f}", *times])
    head = ["bytes of a rank", "alone, ms", "GB/s out", "products alone, ms", "both at once, ms"]
    return _table(head, body)


def steps_by_host(folder: Path) -> str:
    """Steps with divided experts by variant, beside the first of each run and its bound."""
    body = []
    for what, file, base, bound in (
        ("training", _TRAINED, "standard-fused", "comm-free-fused"),
        ("distillation", _DISTILLED, "blocking", "comm-free"),
    ):
        variants = _variants(folder, file)
        steps = {name: variants[name]["step"] for name in (base, *(name for name in variants if name != base))}
        for name, *cells in _compared(steps, base, bound):
            sent = variants[name].get("sent_bytes")
            body.append([f"{what}: {name}", *cells, f"{sent / 2**20:,.0f}" if sent else ""])
    return _table(["variant", "step, ms", "x the first", "of the bound", "MiB sent"], body)


def sums_by_host(folder: Path) -> str:
    """Tensor-parallel distillation steps by wiring and sums, beside the first of each run and the wiring's bound."""
    runs = {
        "8B": {name: one["ms"] for name, one in _read(folder, _SHARDED)["variants"].items()},
        "70B": {name: [_of_width(folder)[way]["ms"]] for name, way in _WIDE_WAYS.items()},
    }
    body = []
    for width, steps in runs.items():
        for name, *cells in _compared(steps, next(iter(steps))):
            body.append([f"{width}'s width: {name}", *cells])
    return _table(["wiring, sums", "step, ms", "x the first", "of the bound"], body)


def four_ranks(folder: Path) -> str:
    """Steps at 70B's width in which converted layers alone train, of four ranks; see ``train.converted_layers``."""
    ways = {
        "standard,own-weights,nccl": "standard, sums under weight gradients",
        "ladder,on,nccl": "ladder",
        "ladder,on,host": "ladder, by-host",
        "ladder,off,none": "ladder, bound",
    }
    body = []
    for where, file in (
        ("NVLink", "converted_layers_70b_4xh200.json"),
        ("NVLink, 8 rows", "converted_layers_70b_8_rows_4xh200.json"),
        ("without", "converted_layers_70b_slow_4xh200.json"),
    ):
        raw = _read(folder, file)
        times = {way: statistics.median(row["ms"]) for way, row in raw["ways"].items()}
        for way, what in ways.items():
            if way not in times:
                continue
            rate = 1e3 * raw["tokens"] / times[way]
            share, gained = times["ladder,off,none"] / times[way], times["standard,own-weights,nccl"] / times[way]
            cells = [f"{times[way]:.0f}", f"{gained:.2f}", f"{share:.1%}", f"{rate / raw['world']:,.0f}"]
            peak = f"{raw['ways'][way]['peak_gib']:.1f}, {raw['plan_gib']:.1f}"
            body.append([f"{where}: {what}", *cells, f"{rate / raw['full_speed']:.1%}", peak])
    head = [
        "link: wiring, sums",
        "step, ms",
        "x the first",
        "of the bound",
        "tokens/s of a GPU",
        "MFU",
        "peak, planned, GiB",
    ]
    return _table(head, body)


def served_by_four(folder: Path) -> str:
    """Prompts and steps of eight layers in the own engine, of four ranks: milliseconds, then how many times as fast."""
    body = []
    for link, file in (("NVLink", "infer_70b_tp4_nvlink_4xh200.json"), ("without", "infer_70b_tp4_slow_4xh200.json")):
        rows = {(row["batch"], row["wiring"], row["exact"]): row for row in _read(folder, file)["rows"]}
        for batch in sorted({batch for batch, *_ in rows}):
            cells = [f"{link}, {batch}"]
            for time in ("prefill_ms", "decode_ms"):
                first = rows[batch, "standard", True][time]
                cells.append(f"{first:.2f}")
                for wiring, exact in (("ladder", True), ("desync-4x", True), ("standard", False)):
                    cells.append(f"{first / rows[batch, wiring, exact][time]:.2f}x")
            body.append(cells)
    ways = ["ladder", "desync-4x", "the bound"]
    return _table(["link, prompts", "prompts, standard, ms", *ways, "step, standard, ms", *ways], body)


def by_host(folder: Path) -> str:
    """What a user chooses by: the share of the bound's speed by NCCL and through the host."""

    def row(what: str, steps: Mapping[str, list[float]], bound: str, *ways: str) -> list[str]:
        times = {name: statistics.median(steps[name]) for name in (bound, *ways)}
        return [what, *(f"{times[bound] / times[way]:.1%}" for way in ways)]

    trained, distilled, sharded = (
        {name: one.get("step") or one["ms"] for name, one in variants.items()}
        for variants in (
            _variants(folder, _TRAINED),
            _variants(folder, _DISTILLED),
            _read(folder, _SHARDED)["variants"],
        )
    )
    fused = "overlapped-fused", "by-host-fused"
    body = [
        row("experts, training", trained, "comm-free-fused", *fused),
        row("`dedup: rank`, training", trained, "comm-free-fused", *(f"{way}+rank" for way in fused)),
        row("experts, distillation", distilled, "comm-free", "overlapped", "by-host"),
        row("`tp_size`, `ladder`", sharded, "ladder, bound", "ladder, overlapped", "ladder, by-host"),
    ]
    return _table(["of the bound", "NCCL", "`host`"], body)


def divided(folder: Path) -> str:
    """What the run at 70B's width found of each way to divide a model."""
    groups = {"tp-off": "TP 2, no NVLink", "zero3-off": "ZeRO-3, no NVLink", "tp-on": "TP 2", "zero3-on": "ZeRO-3"}
    groups |= {"zero1-on": "ZeRO-1", "zero3-bucket": "ZeRO-3, larger buckets"}
    body = []
    for name, one in _of_width(folder).items():
        group, _, way = name.partition(": ")
        figures = f"{one['ms']:.1f}", f"{one['tokens']:,.0f}", f"{one['mfu']:.1%}", f"{one['gib']:.2f}"
        body.append([f"{groups[group]}: {way}", *figures])
    return _table(["way", "step, ms", "tokens/s of a GPU", "MFU", "peak, GiB"], body)


def _of_width(folder: Path) -> dict[str, dict[str, float]]:
    """What ``divide_70b_2xh200.txt`` has of each way, by ``GROUP: WAY``."""
    found: dict[str, dict[str, float]] = {}
    group = ""
    for line in (folder / _WIDE).read_text().splitlines():
        if named := re.match(r"(\S+): exit codes", line):
            group = named[1]
        if told := re.match(r"  (.+?)  +([\d.]+) ms .* ([\d,]+) tokens/s per GPU, MFU ([\d.]+)%, peak ([\d.]+)", line):
            way, *figures = told.groups()
            ms, tokens, mfu, gib = (float(figure.replace(",", "")) for figure in figures)
            found[f"{group}: {way}"] = {"ms": ms, "tokens": tokens, "mfu": mfu / 100, "gib": gib}
    return found


def _compared(steps: Mapping[str, list[float]], base: str, bound: str = "") -> Iterator[list[str]]:
    """A row for each variant: its milliseconds, its speed beside ``base``, and its share of the speed of the bound.

    Args:
        bound: without a name, each wiring has its own, which may be missing.
    """
    times = {name: statistics.median(step) for name, step in steps.items()}
    for name, step in steps.items():
        spreads = f" ± {spread(step):.1f}" if len(step) > 1 else ""
        least = times.get(bound or f"{name.partition(', ')[0]}, bound")
        share = "" if least is None else f"{least / times[name]:.1%}"
        yield [name, f"{times[name]:.1f}{spreads}", f"{times[base] / times[name]:.3f}", share]


def _variants(folder: Path, file: str) -> dict[str, Any]:
    return _read(folder, file)["routers"]["uniform"]["variants"]


def _read(folder: Path, file: str) -> Any:
    return json.loads((folder / file).read_text())


def _table(head: list[str], body: list[list[str]]) -> str:
    return table(head, body, left=1) + "\n"


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
