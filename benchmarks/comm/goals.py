"""What sums through memory of the host should bring, and what was measured: the table of `host_goals.md`.

`python scripts/write_reference.py` writes it. A row whose raw files are not there, or that has none, was not run. What
was measured in several runs is reached if all of them reached it.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.markdown import table

RESULTS = Path("benchmarks/results")
_TWO, _FOUR, _TURNS = "host_sums_2xh200.json", "host_sums_4xh200.json", "vllm_turns_8b_2xh200.json"
_TABLES, _STRESS = "host_tables_2xh200.json", ("host_sums_stress_2xh200.json", "host_sums_stress_4xh200.json")
_KINDS, _SHARDED = "vllm_host_sums_kinds_one_gpu_1xh200.json", "tp_by_host_graphs_2xh200.json"
_EXPERTS, _OTHERS = "distill_v2lite_by_host_slow_2xh200.json", "vllm_turns_int4_and_experts_2xh200.json"
_WIDE, _WIDE_INT4 = "vllm_turns_70b_tp4_4xh200.json", "vllm_turns_70b_int4_2xh200.json"
_EXPERTS_ALONE, _KINDS_TWO = "vllm_turns_qwen3_experts_2xh200.json", "vllm_host_sums_kinds_2xh200.json"
_ARRIVALS = tuple(f"serve_vllm_load_8b_host_sums_{run}slow_2xh200.json" for run in ("", "again_"))
_GRAPHED_ARRIVALS = ("serve_vllm_load_8b_host_sums_graphs_slow_2xh200.json",)
_WIDE_FP8, _EXPERTS_INT4 = "vllm_turns_70b_fp8_2xh200.json", "vllm_turns_qwen3_int4_2xh200.json"
_LATENT, _OSS, _SCOUT = "vllm_turns_v2lite_2xh200.json", "vllm_turns_gpt_oss_", "vllm_turns_scout_fp8_2xh200.json"
_8B_INT4, _QWEN3 = "llama3-8b:32:w4a16, ", "qwen3-30b-a3b:8, "
_RUNS = (_TURNS, "vllm_turns_8b_one_round_2xh200.json", "vllm_turns_8b_again_2xh200.json")
KIB = 1 << 10


class Goal(NamedTuple):
    """One row.

    Attributes:
        what: is measured.
        least: what it should be at least.
        unit: behind both figures.
        files: the raw files; empty if nothing measures it yet.
        found: the figure, of the content of a file.
    """

    what: str
    least: float
    unit: str
    files: tuple[str, ...] = ()
    found: Callable[[Any], float] = float


def _gains(raw: Any, sizes: Iterable[int], format: str = "") -> float:
    """How many times as fast as NCCL, at the size where it is least: exact, or in a format."""
    table = raw.get("microseconds") or raw["sums"]
    rows = [table[str(size)] for size in sizes]

    def fastest(row: dict[str, float]) -> float:
        return min(
            time for way, time in row.items() if way != "stock" and way.partition(":")[2].partition(":")[0] == format
        )

    return min(row["stock"] / fastest(row) for row in rows)


def _engines(own: str, other: str, what: str) -> Callable[[Any], float]:
    def found(raw: Any) -> float:
        times = [statistics.median(raw["milliseconds"][name][what]) for name in (other, own)]
        return times[0] / times[1]

    return found


def _beside(raw: Any, sums: str) -> float:
    return raw["products, ms"]["nothing"] / raw["products, ms"][sums]


def _without_fault(raw: Any) -> float:
    return 0.0 if raw["wrong values"] else raw["sums"]


def _right(raw: Any) -> float:
    """The kinds with engines by the host's sums whose answers, each asked alone, are NCCL's to the last bit."""

    def same(kind: Any) -> bool:
        rows = [mode["host"]["alone"] for mode in kind.values() if "alone" in mode.get("host", {})]
        equal = [row["equal answers"] == row["of"] and row["largest difference"] == 0 for row in rows]
        return bool(rows) and all(equal)

    return sum(map(same, raw["kinds"].values()))


def _trained(raw: Any, beside: str) -> float:
    times = [statistics.median(raw["variants"][name]["ms"]) for name in (beside, "ladder, by-host")]
    return times[0] / times[1]


def _beside_standard(raw: Any) -> float:
    """Beside standard at its best."""
    ways = [name for name in raw["variants"] if name.startswith("standard, ") and not name.endswith("bound")]
    return min(_trained(raw, name) for name in ways)


def _with_experts(raw: Any) -> float:
    variants = raw["routers"]["uniform"]["variants"]
    times = [statistics.median(variants[name]["step"]) for name in ("comm-free", "by-host")]
    return times[0] / times[1]


def _arrived(raw: Any, own: str = "original, host sums") -> float:
    """A server beside stock under random arrivals, in the figure of the load in which it gains least."""
    stock, rows = (raw["variants"][name]["loads"] for name in ("original", own))
    whats = "first_p50", "first_p99", "token_p50", "token_p99"
    return min(stock[load][what] / row[what] for load, row in rows.items() for what in whats)


_SMALL = [8 * KIB << n for n in range(6)]
_LARGE = [512 * KIB << n for n in range(8)]
_STEPS = "step of 1", "step of 16", "step of 64"
_TOKENS = "first tokens of 16 x 512", "first tokens of 16 x 2048"
_NCCL, _ALONE, _BOUND, _NVLINK = "x NCCL", "x alone", "x the bound", "x stock with NVLink"
_STOCK, _HOST, _INT8, _STAGES = "stock", "host sums", "host sums in int8", ("stock, stages", "stock, pairs")
_LINKED = "stock with NVLink"
_NOT_OURS = (_STOCK, _LINKED, "bound", *_STAGES)


def _timed(name: str, least: float, unit: str, own: str, other: str, what: Sequence[str]) -> list[Goal]:
    return [Goal(f"{name}: {one}", least, unit, _RUNS, _engines(own, other, one)) for one in what]


def _at_worst(way: str, what: Sequence[str] = (), shape: str = "") -> Callable[[Any], float]:
    """How many times as fast one engine is as stock, in the figure in which it gains least.

    Args:
        what: the figures; all of them, if empty.
        shape: what the names of engines begin with where a run had several.
    """

    def found(raw: Any) -> float:
        times = _medians(raw)
        own, stock = times[f"{shape}{way}"], times[f"{shape}{_STOCK}"]
        return min(stock[one] / own[one] for one in what or own)

    return found


def _of_stock(name: str, file: str, shape: str = "", wired: str = "") -> Iterable[Goal]:
    """What a stock model has by exact sums and by INT8, and a wiring by INT8, in the figure that gains least."""
    yield Goal(name, 1.0, _NCCL, (file,), _at_worst(f"stock, {_HOST}", (), shape))
    yield Goal("the same with INT8", 1.0, _NCCL, (file,), _at_worst(f"stock, {_INT8}", (), shape))
    if wired:
        yield Goal(f"the same, {wired} with INT8", 1.0, _NCCL, (file,), _at_worst(f"{wired}, {_INT8}", (), shape))


def _best(raw: Any, beside: Sequence[str], what: Sequence[str]) -> float:
    """What fcsd has without NVLink, with the fastest of its engines for each figure, beside the fastest of others."""
    times = _medians(raw)
    own = [row for name, row in times.items() if name not in _NOT_OURS]
    return min(min(times[name][one] for name in beside) / min(row[one] for row in own) for one in what)


def _medians(raw: Any) -> dict[str, dict[str, float]]:
    rows = raw["milliseconds"]
    return {name: {what: statistics.median(times) for what, times in row.items()} for name, row in rows.items()}


def _of_four() -> Iterable[Goal]:
    """What four ranks had at 70B's width, at worst."""
    for name, own in (("stock", f"stock, {_HOST}"), ("INT8", f"stock, {_INT8}"), ("ladder, INT8", f"ladder, {_INT8}")):
        yield Goal(f"four ranks, 70B's width, {name}: first tokens", 1.5, _NCCL, (_WIDE,), _at_worst(own, _TOKENS))
        yield Goal("the same: steps", 1.15, _NCCL, (_WIDE,), _at_worst(own, _STEPS))
    stages = partial(_best, beside=_STAGES, what=_TOKENS)
    yield Goal("fcsd at its best beside stages of stock: first tokens", 1.0, "x the stages", (_WIDE,), stages)


GOALS = (
    Goal("one sum, two ranks, exact: 16 KiB", 2.8, _NCCL, (_TABLES,), partial(_gains, sizes=[16 * KIB])),
    Goal("the same, 64 KiB", 2.4, _NCCL, (_TABLES,), partial(_gains, sizes=[64 * KIB])),
    Goal("the same, 1 MiB", 1.4, _NCCL, (_TABLES,), partial(_gains, sizes=[1024 * KIB])),
    Goal("the same, 16 MiB", 1.3, _NCCL, (_TABLES,), partial(_gains, sizes=[16384 * KIB])),
    Goal("the same, 16 MiB in INT8", 2.2, _NCCL, (_TABLES,), partial(_gains, sizes=[16384 * KIB], format="int8")),
    Goal("the same, 16 MiB in INT4", 3.2, _NCCL, (_TWO,), partial(_gains, sizes=[16384 * KIB], format="int4")),
    Goal("one sum, four ranks, at worst to 256 KiB", 2.0, _NCCL, (_FOUR,), partial(_gains, sizes=_SMALL)),
    Goal("the same, at worst above", 1.2, _NCCL, (_FOUR,), partial(_gains, sizes=_LARGE)),
    Goal("products beside sums of 16 MiB", 1 / 1.05, _ALONE, (_TWO,), partial(_beside, sums="host, 16 MiB")),
    Goal("products beside sums of 64 KiB", 1 / 1.05, _ALONE, (_TWO,), partial(_beside, sums="host, 64 KiB")),
    Goal("random sums between two GPUs, and between four, without a wrong bit", 1e6, "", _STRESS, _without_fault),
    Goal("kinds of stock models whose answers are NCCL's to the last bit, of eight", 8, "", (_KINDS,), _right),
    Goal("the same on two GPUs, in graphs, eager and compiled, of five", 5, "", (_KINDS_TWO,), _right),
    *_timed("stock 8B, two ranks", 1.15, _NCCL, f"stock, {_HOST}", _STOCK, _STEPS),
    *_timed("the same", 1.25, _NCCL, f"stock, {_HOST}", _STOCK, _TOKENS),
    *_timed("the same with INT8", 1.6, _NCCL, f"stock, {_INT8}", _STOCK, _TOKENS),
    *_timed("ladder", 0.95, _BOUND, f"ladder, {_HOST}", "bound", _STEPS),
    *_timed("the same", 0.85, _BOUND, f"ladder, {_HOST}", "bound", _TOKENS),
    *_timed("the same with INT8", 0.92, _BOUND, f"ladder, {_INT8}", "bound", _TOKENS),
    *_of_stock("stock 8B with INT4 weights, at worst", _OTHERS, shape=_8B_INT4),
    *_of_stock("stock 70B's width with INT4 weights, at worst", _WIDE_INT4),
    *_of_stock("stock 70B's width with FP8 weights, at worst", _WIDE_FP8),
    *_of_stock("16 layers of stock Qwen3-30B-A3B, at worst", _EXPERTS_ALONE),
    *_of_stock("eight of its layers, beside other engines", _OTHERS, shape=_QWEN3),
    *_of_stock("16 of its layers with INT4 weights", _EXPERTS_INT4, wired="farskip"),
    *_of_stock("eight layers of stock DeepSeek-V2-Lite, at worst", _LATENT, wired="farskip"),
    *_of_stock("12 layers of stock gpt-oss-20b in MXFP4, at worst", f"{_OSS}20b_2xh200.json", wired="farskip"),
    *_of_stock("six layers of stock gpt-oss-120b in MXFP4, at worst", f"{_OSS}120b_2xh200.json", wired="farskip"),
    *_of_stock("four layers of stock Llama-4-Scout in FP8, at worst", _SCOUT, wired="farskip"),
    Goal("random arrivals, medians and 99th percentiles, stock, at worst", 1.0, _NCCL, _ARRIVALS, _arrived),
    Goal("the same with ladder", 1.0, _NCCL, _ARRIVALS, partial(_arrived, own="ladder, host sums")),
    Goal("random arrivals with larger CUDA graphs, stock, at worst", 1.0, _NCCL, _GRAPHED_ARRIVALS, _arrived),
    Goal("the same with ladder", 1.0, _NCCL, _GRAPHED_ARRIVALS, partial(_arrived, own="ladder, host sums")),
    *_of_four(),
    *(
        Goal(f"fcsd at its best, NVLink off: {one}", 1.0, _NVLINK, _RUNS, partial(_best, beside=[_LINKED], what=[one]))
        for one in (*_STEPS, *_TOKENS)
    ),
    *(
        Goal(f"{name}, at worst", 1.0, _NVLINK, (file,), partial(_best, beside=[_LINKED], what=_STEPS + _TOKENS))
        for name, file in (
            ("the same, 70B's width with INT4 weights", _WIDE_INT4),
            ("the same with FP8 weights", _WIDE_FP8),
            ("the same, four ranks", _WIDE),
        )
    ),
    Goal("a distillation step of ladder, two ranks", 1.35, "x standard", (_SHARDED,), _beside_standard),
    Goal("the same", 0.88, "x the bound", (_SHARDED,), partial(_trained, beside="ladder, bound")),
    Goal("a distillation step with divided experts, two ranks", 0.93, "x the bound", (_EXPERTS,), _with_experts),
)


def goals(root: Path) -> str:
    """The table, and how many of its rows were reached."""
    body, reached = [], {"yes": 0, "**no**": 0, "not run": 0}
    for goal in GOALS:
        files = [file for file in goal.files if (root / RESULTS / file).exists()]
        values = [goal.found(json.loads((root / RESULTS / file).read_text())) for file in files]
        met = ("yes" if min(values) >= goal.least else "**no**") if values else "not run"
        measured = ", ".join(_shown(value, goal.least) for value in values) + (goal.unit if values else "")
        raw = ", ".join(f"[raw]({file})" for file in files)
        reached[met] += 1
        body.append([goal.what, f"{_shown(goal.least)}{goal.unit}", measured, met, raw])
    counted = f"Reached {reached['yes']}, missed {reached['**no**']}, not run {reached['not run']}.\n\n"
    return counted + table(["what", "goal", "measured", "reached", "from"], body, left=1) + "\n"


def _shown(value: float, least: float = 0.0) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    hidden = value < least and f"{value:.2f}" == f"{least:.2f}"  # else a goal that was just missed would look reached
    return f"{value:.3f}" if hidden else f"{value:.2f}"
