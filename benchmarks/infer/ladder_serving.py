"""Runs and tabulates the measurements of Ladder-Residual's serving tables with fcsd's engine.

    python -m benchmarks.infer.ladder_serving run GPUS OUT [--sizes 70B,...] [--minutes 9]    a piece, then the tables
    python -m benchmarks.infer.ladder_serving tables OUT    tables.md, tables.json and figure_4.png of what is measured

A measurement is one call of ``python -m benchmarks.infer`` for a size, a tensor-parallel degree, a link and a depth. It
has a folder below OUT, and is not repeated if its ``infer.json`` has all batches. The weights are random and the layers
of a model are alike, so the time of a step is linear in the number of layers: ``a + b x layers``. Every model is
measured at two depths, and the tables hold the time of the whole model that follows from them. Decoding is timed for
``NEW`` tokens behind prompts of 1024, and counted for 512.

A whole model that does not fit is OOM, as in the paper: its weights and keys and values are counted and compared with
the memory of the GPU. So is a variant that ran out of memory at a small depth.

Source: Ladder-Residual, Tables 1, 2 and 6, Figures 2 and 4. ``benchmarks/infer/ladder_serving.sh`` calls this file.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.markdown import table

ROOT = Path(__file__).parents[2]

SIZES = {  # a name in fcsd.bench.shapes, and the layers of the whole model
    "1B": ("llama3-1b", 16), "3B": ("llama3-3b", 28), "8B": ("llama3-8b", 32),
    "34B": ("llama-34b", 48), "70B": ("llama3-70b", 80), "176B": ("llama-176b", 70),
}  # fmt: skip
LINKS = ("nvlink", "no-nvlink")
DEPTHS = (4, 8)
WIRINGS = ("standard", "ladder", "parallel", "desync-2x", "desync-4x")
STANDARD, BOUND = "standard", "bound"
PROMPT, ANSWER, NEW, ROUNDS = 1024, 512, 33, 2
BYTES = 2  # of a bfloat16
RESERVE = 6 << 30  # bytes of a GPU for activations, graphs and NCCL
LIMIT_S = 560  # of one measurement
GRACE_S = 45  # torchrun gives its ranks 30 s to end
Row = dict[str, Any]


class Piece(NamedTuple):
    """One measurement: a call of ``python -m benchmarks.infer``."""

    size: str
    link: str
    degree: int
    layers: int
    batches: tuple[int, ...]

    @property
    def folder(self) -> str:
        return f"{self.size}-{self.link}-tp{self.degree}-{self.layers}"


def pieces(gpus: int, sizes: list[str]) -> Iterator[Piece]:
    """All measurements, the 70B model's first. Only that model has several batches and degrees."""
    degrees = [degree for degree in (8, 4, 2, 1) if degree <= gpus]
    for size in sorted(sizes, key=lambda size: (size != "70B", list(SIZES).index(size))):
        for degree, link, depth in itertools.product(degrees if size == "70B" else degrees[:1], LINKS, DEPTHS):
            if degree > 1 or link == LINKS[0]:
                yield Piece(size, link, degree, depth, (1, 4, 16, 64) if size == "70B" else (4,))


def command(piece: Piece, out: Path, reduce: str) -> list[str]:
    """The call of ``python -m benchmarks.infer`` for a measurement, with the options in the environment's OPTIONS."""
    batches = ",".join(map(str, piece.batches))
    words = [SIZES[piece.size][0], "--layers", piece.layers, "--tp", piece.degree, "--batch", batches]
    words += ["--prompt", PROMPT, "--new", NEW, "--rounds", ROUNDS, "--wirings", ",".join(WIRINGS)]
    words += ["--reduce", f"{reduce},none", "--bounds", STANDARD, "--out", out / piece.folder]
    words += ["--no-nvlink"] if piece.link == "no-nvlink" else []
    words += os.environ.get("OPTIONS", "").split()
    return [sys.executable, "-m", "benchmarks.infer", *map(str, words)]


def rows_of(piece: Piece, out: Path) -> list[Row]:
    """What a measurement has found so far."""
    file = out / piece.folder / "infer.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def run(gpus: int, out: Path, sizes: list[str], minutes: float, reduce: str) -> int:
    """Measure what is missing, as long as there is time. Returns how many measurements are left."""
    start, slowest, left = time.monotonic(), 120.0, 0
    out.mkdir(parents=True, exist_ok=True)
    (out / "reduce.txt").write_text(reduce)
    for piece in pieces(gpus, sizes):
        if {row["batch"] for row in rows_of(piece, out)} == set(piece.batches):
            continue
        if time.monotonic() - start + slowest > 60 * minutes:
            left += 1
            continue
        begun = time.monotonic()
        limit = min(LIMIT_S, 60 * minutes - (begun - start))
        print(f"{piece.folder} at {begun - start:.0f} s", file=sys.stderr, flush=True)
        left += not ends_well(command(piece, out, reduce), limit)
        slowest = max(slowest, time.monotonic() - begun)
    return left


def ends_well(words: list[str], seconds: float) -> bool:
    """Whether a command ends with 0 within some seconds. Otherwise it is told to end, so that its ranks end, too."""
    process = subprocess.Popen(words, cwd=ROOT)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.terminate()  # does nothing if it has ended
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def fits(size: str, degree: int, batch: int, memory: int) -> bool:
    """Whether the weights, keys and values of the whole model fit into ``memory`` bytes of each GPU."""
    from fcsd.bench.shapes import SHAPES

    shape, layers = SIZES[size]
    config: Any = SHAPES[shape](1)
    hidden, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    layer = hidden * (2 * hidden + 2 * config.num_key_value_heads * head + 3 * config.intermediate_size)
    rest = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    heads = max(1, config.num_key_value_heads // degree)
    cache = batch * (PROMPT + ANSWER) * heads * head * 2 * layers
    return (layer * layers / degree + rest + cache) * BYTES + RESERVE <= memory


def whole(size: str, rows: dict[int, Row], memory: int) -> Row:
    """The row of the whole model: the line through the times at two depths, or OOM."""
    layers = SIZES[size][1]
    (small, first), (large, second) = sorted(rows.items())
    row: Row = {key: first[key] for key in ("tp", "batch", "wiring", "reduce", "exact")} | {"size": size}
    row["out_of_memory"] = any(found["out_of_memory"] for found in (first, second))
    row["out_of_memory"] |= not fits(size, row["tp"], row["batch"], memory)
    if row["out_of_memory"]:
        return row
    for key in ("prefill_ms", "decode_ms"):
        slope = (second[key] - first[key]) / (large - small)
        row[key] = second[key] + slope * (layers - large)
        row[f"{key}_per_layer"] = slope
    row["total_ms"] = row["prefill_ms"] + row["decode_ms"] * (ANSWER - 1)
    row["tokens_per_s"] = 1e3 * row["batch"] * ANSWER / row["total_ms"]
    return row


def all_rows(out: Path, memory: int) -> list[Row]:
    """Rows of whole models, each with ``times_standard``, for every measurement that has both depths."""
    found: dict[tuple, dict[int, Row]] = {}
    every = dict.fromkeys(piece for gpus in (8, 4, 2, 1) for piece in pieces(gpus, list(SIZES)))
    for piece in every:
        for row in rows_of(piece, out):
            key = (piece.size, piece.link, row["tp"], row["batch"], row["wiring"], row["reduce"])
            found.setdefault(key, {})[piece.layers] = row
    rows = [whole(key[0], depths, memory) | {"link": key[1]} for key, depths in found.items() if len(depths) == 2]
    for row in rows:
        same = [r for r in rows if all(r[key] == row[key] for key in ("size", "link", "tp", "batch"))]
        best = [r["tokens_per_s"] for r in same if r["wiring"] == STANDARD and r["exact"] and not r["out_of_memory"]]
        row["name"] = row["wiring"] if row["exact"] else BOUND
        row["times_standard"] = row["tokens_per_s"] / max(best) if best and not row["out_of_memory"] else None
    return rows


def cell(rows: list[Row], key: str, **wanted: Any) -> str:
    """One number of a table: of the fastest all-reduce backend that a variant was measured with."""
    fit = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if not fit:
        return "-"
    values = [row[key] for row in fit if not row["out_of_memory"] and row[key] is not None]
    return f"{max(values):.3g}" if values and key == "times_standard" else f"{min(values):.4g}" if values else "OOM"


def speed_table(rows: list[Row], title: str, lines: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """A table with the standard wiring's tokens per second, and how many times that every other variant gives."""
    others = (*WIRINGS[1:], BOUND)
    body = []
    for label, wanted in lines:
        cells = [cell(rows, "tokens_per_s", name=STANDARD, **wanted)]
        cells += [cell(rows, "times_standard", name=name, **wanted) for name in others]
        if any(found != "-" for found in cells):
            body.append([label, *cells])
    return [f"## {title}", "", table(["", f"tokens/s, {STANDARD}", *others], body), ""]


def latency_table(rows: list[Row], title: str, batch: int) -> list[str]:
    """Prefill and decode latency of the 70B model at the largest degree that was measured."""
    mine = [row for row in rows if row["size"] == "70B" and row["batch"] == batch]
    degree = max((row["tp"] for row in mine), default=0)
    body = []
    for link, name in itertools.product(LINKS, (*WIRINGS, BOUND)):
        wanted = dict(link=link, name=name, tp=degree)
        cells = [cell(mine, key, **wanted) for key in ("prefill_ms", "decode_ms", "times_standard")]
        if cells[0] != "-":
            body.append([link, name, *cells])
    head = ["link", "variant", "prefill, ms", "decode, ms per token", "x standard"]
    return [f"## {title}, TP {degree}", "", table(head, body, left=2), ""]


def pareto(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """For each link and variant of the 70B model, the runs that no other run beats in latency and in throughput."""
    found: dict[tuple[str, str], list[Row]] = {}
    for link, name in itertools.product(LINKS, (*WIRINGS, BOUND)):
        mine = [row for row in rows if (row["size"], row["link"], row["name"]) == ("70B", link, name)]
        mine = [row | {"per_gpu": row["tokens_per_s"] / row["tp"]} for row in mine if not row["out_of_memory"]]
        for row in sorted(mine, key=lambda row: (row["total_ms"], -row["per_gpu"])):
            line = found.setdefault((link, name), [])
            if not line or row["per_gpu"] > line[-1]["per_gpu"]:
                line.append(row)
    return found


def draw(lines: dict[tuple[str, str], list[Row]], path: Path) -> None:
    """Figure 4: completion latency and throughput per GPU, one picture for each link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, link in zip(figure.subplots(1, 2), LINKS, strict=True):
        for (where, name), line in lines.items():
            if where == link:
                style = "--" if name == BOUND else "-o"
                axes.plot([row["total_ms"] / 1e3 for row in line], [row["per_gpu"] for row in line], style, label=name)
        axes.set(title=f"70B, {link}", xlabel="seconds until an answer is complete", ylabel="tokens/s per GPU")
        axes.legend() if axes.lines else None
    figure.savefig(path, dpi=120)


def tables(out: Path, memory: int) -> None:
    """Write the tables and Figure 4 from what has been measured."""
    rows = all_rows(out, memory)
    degree = max((row["tp"] for row in rows), default=0)
    text: list[str] = []
    for link in LINKS:
        lines = [(size, dict(size=size, link=link, tp=degree, batch=4)) for size in SIZES]
        text += speed_table(rows, f"Table 1, {link}: batch 4, TP {degree}", lines)
    text += latency_table(rows, "Table 2: 70B, batch 1", 1)
    for link in LINKS:
        some = itertools.product((1, 2, 4, 8), (1, 4, 16, 64))
        cases = [(f"TP {tp}, batch {b}", dict(size="70B", link=link, tp=tp, batch=b)) for tp, b in some]
        text += speed_table(rows, f"Figure 2, {link}: 70B", cases)
    text += latency_table(rows, "Table 6: 70B, batch 64", 64)
    lines = pareto(rows)
    shown = "TP {tp} batch {batch}: {total_ms:.0f} ms, {per_gpu:.1f} tokens/s per GPU"
    body = [[*variant, "; ".join(shown.format(**row) for row in line)] for variant, line in lines.items()]
    text += ["## Figure 4: 70B, the runs that no other run beats", "", table(["link", "variant", "runs"], body, left=3)]
    (out / "tables.md").write_text("\n".join(text) + "\n")
    (out / "tables.json").write_text(json.dumps(rows, indent=1))
    draw(lines, out / "figure_4.png")
    print("\n".join(text))


def main() -> None:
    """Run the part that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("run", "tables"))
    parser.add_argument("words", nargs="+", help="GPUS OUT, or OUT")
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--minutes", type=float, default=9.0, help="until no further measurement is started")
    parser.add_argument("--memory-gib", type=int, default=139, help="of a GPU, for the rows that are OOM")
    given = parser.parse_args()
    out = Path(given.words[-1])
    if given.part == "tables":
        return tables(out, given.memory_gib << 30)
    left = run(int(given.words[0]), out, given.sizes, given.minutes, os.environ.get("REDUCE", "nccl"))
    tables(out, given.memory_gib << 30)
    print(f"{left} measurements are left" if left else "all measurements are done", file=sys.stderr)
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
