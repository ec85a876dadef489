"""The table and the picture of ``python -m benchmarks.infer``."""

from pathlib import Path
from typing import Any

from benchmarks.sent import bits_sent

from fcsd.bench import runner


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row. A bound, whose results are wrong, is marked; what did not fit into memory says OOM."""
    lines = {}
    for row in rows:
        name = f"{row['tp']} x {row['batch']} {row['wiring']}, {row['reduce']}"
        lines[name if row["exact"] else f"{name} (bound: wrong results)"] = _cells(row)
    kinds = [row["reduce"] for row in rows if row["reduce"].startswith("quantised:")]
    formats = dict.fromkeys(kind.removeprefix("quantised:") for kind in kinds)
    text = runner.table(lines, "tp x batch")
    return f"{text}\non the wire: {bits_sent(formats)}" if formats else text


def _cells(row: dict[str, Any]) -> dict[str, str | None]:
    cells: dict[str, str | None] = {}
    for phase in ("prefill", "decode"):
        time, standard, bound = row[f"{phase}_ms"], row[f"{phase}_times_standard"], row[f"{phase}_of_bound"]
        cells[f"{phase} ms"] = "OOM" if row["out_of_memory"] else f"{time:.3f}"
        cells[f"{phase} x standard"] = None if standard is None else f"{standard:.3f}"
        cells[f"{phase} of bound"] = None if bound is None or not row["exact"] else f"{bound:.1%}"
    if not row["out_of_memory"]:
        cells |= {"tokens/s": f"{row['tokens_per_s']:.1f}", "drift": f"{row['drift']:.3f}"}
    return cells


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """A PNG with the speed-up over the standard wiring, for prefill and decoding: a line for each wiring and kind.

    The places on the horizontal axis are the degrees and batches. Bounds are dashed. A cross on the lower edge stands
    for a variant that did not fit into memory; where the standard wiring did not fit, nothing can be compared.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = {place: n for n, place in enumerate(dict.fromkeys((row["tp"], row["batch"]) for row in rows))}
    variants = list(dict.fromkeys((row["wiring"], row["reduce"]) for row in rows))
    figure = Figure(figsize=(max(6.4, 1.2 * len(places) + 3), 6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, phase in enumerate(("prefill", "decode"), 1):
        axes = figure.add_subplot(2, 1, panel)
        axes.axhline(1, color="#999999", linewidth=0.8)
        for number, (wiring, kind) in enumerate(variants):
            own = [row for row in rows if (row["wiring"], row["reduce"]) == (wiring, kind)]
            line: dict[str, Any] = {"color": f"C{number}", "linestyle": "-" if own[0]["exact"] else "--", "marker": "o"}
            for tp in dict.fromkeys(row["tp"] for row in own):  # lines connect the batches of one degree
                timed = [row for row in own if row["tp"] == tp and row[f"{phase}_times_standard"] is not None]
                at = [places[tp, row["batch"]] for row in timed]
                axes.plot(at, [row[f"{phase}_times_standard"] for row in timed], **line, markersize=4)
            missing = [places[row["tp"], row["batch"]] for row in own if row["out_of_memory"]]
            height = [0.04 + 0.04 * number] * len(missing)
            axes.plot(missing, height, "x", color=line["color"], transform=axes.get_xaxis_transform())
            name = f"{wiring}, {kind}" if own[0]["exact"] else f"{wiring}: bound"
            axes.plot([], [], **line, markersize=4, label=name)
        axes.set_xticks(list(places.values()), [f"TP {tp}\nbatch {batch}" for tp, batch in places])
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_ylabel(f"{phase}: x standard")
    figure.suptitle(title, fontsize=10)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
