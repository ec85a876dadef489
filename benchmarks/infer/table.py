"""The table and the picture of ``python -m benchmarks.infer``."""

from pathlib import Path
from typing import Any

from fcsd.kernels.bit_split.format import bits_sent


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row. A bound, whose results are wrong, is marked; what did not fit into memory says OOM."""
    wide = max([16, *(len(row["reduce"]) for row in rows)])
    head = f"{'tp':>3s} {'batch':>5s} {'wiring':12s} {'reduce':{wide}s} {'prefill ms':>11s} {'x std':>6s}"
    decode = f"{'decode ms':>10s} {'x std':>6s} {'of bound':>8s} {'tokens/s':>10s} {'drift':>6s}"
    lines = [f"{head} {'of bound':>8s} {decode}"]
    for row in rows:
        line = f"{row['tp']:3d} {row['batch']:5d} {row['wiring']:12s} {row['reduce']:{wide}s}"
        if row["out_of_memory"]:
            lines.append(f"{line} {'OOM':>11s} {'-':>6s} {'-':>8s} {'OOM':>10s}")
            continue
        for phase, width in (("prefill", 11), ("decode", 10)):
            standard, bound = row[f"{phase}_times_standard"], row[f"{phase}_of_bound"]
            line += f" {row[f'{phase}_ms']:{width}.3f}"
            line += f" {'-':>6s}" if standard is None else f" {standard:6.3f}"
            line += f" {'-':>8s}" if bound is None or not row["exact"] else f" {bound:8.1%}"
        line += f" {row['tokens_per_s']:10.1f} {row['drift']:6.3f}"
        lines.append(line if row["exact"] else f"{line}  bound: wrong results")
    kinds = [row["reduce"] for row in rows if row["reduce"].startswith("quantised:")]
    formats = dict.fromkeys(kind.removeprefix("quantised:") for kind in kinds)
    return "\n".join([*lines, f"on the wire: {bits_sent(formats)}"] if formats else lines)


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
