"""Says how much communication traces hide, and draws one layer's passes on two streams (FarSkip Figures 9 and 10)."""

import argparse
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fcsd.errors import BadInputError
from fcsd.parallel.trace import Call, Kernel, Overlap, Trace, covered, overlaps, read, read_content, union

# Classes of kernels, with a pattern of their names and a colour; a kernel belongs to the first class that matches.
_CLASSES = {
    "core attention": (re.compile(r"flash|fmha|sdpa|attention|softmax_warp", re.IGNORECASE), "#4C72B0"),
    "matrix products": (re.compile(r"gemm|nvjet|cutlass|matmul|xmma|grouped", re.IGNORECASE), "#55A868"),
    "all else": (re.compile(""), "#C7C7C7"),
}
_WIRE = {"dispatch": "#DD8452", "combine": "#C44E52"}
# pass -> (the collective that begins a layer in this pass, offset of the layer that comes next in this pass)
_PASSES = {"fwd": ("dispatch", 1), "bwd": ("combine", -1)}


def files(given: list[Path]) -> list[Path]:
    """Paths of trace files; a directory stands for the traces that ``benchmarks.train.step --out`` wrote into it.

    Raises:
        BadInputError: a directory contains no trace.
    """
    found = []
    for path in given:
        inside = sorted(path.glob("rank-*.json.gz")) if path.is_dir() else [path]
        if not inside:
            raise BadInputError(f"no trace in {path}", hint="benchmarks.train.step --trace --out DIR writes them")
        found += inside
    return found


def hta_overlap(path: Path) -> float:
    """The percentage that HolisticTraceAnalysis's ``get_comm_comp_overlap`` gives for the trace of a rank.

    It is the part of the time of all NCCL kernels, including ZeRO's and those that exchange counts, during which any
    other kernel runs too. HTA counts kernels only, in whole microseconds.
    """
    kinds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in read_content(path)["traceEvents"]:
        whole = math.ceil(event["ts"]), math.floor(event["ts"] + event["dur"])
        if event.get("cat") == "kernel" and whole[0] < whole[1]:
            kinds[event["name"].startswith("nccl")].append(whole)
    nccl, others = union(kinds[True]), union(kinds[False])
    total = float((nccl[:, 1] - nccl[:, 0]).sum())
    return 100 * sum(covered(start, end, others) for start, end in nccl) / total if total else 0.0


def without_last_combine(traces: list[Trace]) -> dict[tuple[str, str], Overlap]:
    """``overlaps`` without the combine of the last layer.

    No computation follows it in the forward pass, and none precedes it in the backward pass, so nothing can hide it.
    """
    last = "combine", max(call.layer for trace in traces for call in trace.calls)
    kept = [replace(each, calls=[call for call in each.calls if (call.kind, call.layer) != last]) for each in traces]
    return overlaps(kept)


def to_text(traces: list[Trace], paths: list[Path]) -> str:
    """The table that `python -m benchmarks.train.trace` prints, of traces and their files."""
    lines = [f"{'':20s} {'calls':>6s} {'on device ms':>13s} {'late ms':>8s} {'hidden':>8s} {'exposed ms':>11s}"]
    trimmed = without_last_combine(traces)
    for (kind, passes), found in overlaps(traces).items():
        late = "-" if found.late is None else f"{found.late:.2f}"
        name = "dispatch+combine" if kind == "all" else kind
        line = f"{name + ' ' + passes:20s} {found.calls:6d} {found.on_device:13.2f} {late:>8s} {found.share:8.1%}"
        line += f" {found.exposed:11.2f}"
        if kind == "all" and (kind, passes) in trimmed:
            line += f"   {trimmed[kind, passes].share:.1%} without the last layer's combine"
        lines.append(line)
    hta = ", ".join(f"rank {trace.rank} {hta_overlap(path):.2f} %" for trace, path in zip(traces, paths, strict=True))
    lines.append(f"HolisticTraceAnalysis's overlap of all NCCL kernels: {hta}")
    return "\n".join(lines)


def to_json(traces: list[Trace], paths: list[Path]) -> dict[str, Any]:
    """The figures of ``to_text`` as data: times in ms, shares in 0..1, and HTA's figure in per cent."""

    def rows(found: dict[tuple[str, str], Overlap]) -> dict[str, Any]:
        return {
            f"{kind}.{passes}": {**vars(overlap), "share": overlap.share, "exposed": overlap.exposed}
            for (kind, passes), overlap in found.items()
        }

    return {
        "overlap": rows(overlaps(traces)),
        "without_last_combine": rows(without_last_combine(traces)),
        "hta": {str(trace.rank): hta_overlap(path) for trace, path in zip(traces, paths, strict=True)},
    }


def draw(trace: Trace, path: Path, layer: int | None = None) -> None:
    """Writes a PNG with two lanes for each pass: the computation stream, and dispatch and combine below it.

    The time is in ms. If a collective consists of copies, the time between the copies is pale. In this time it waits
    for a late rank or for rows.

    Args:
        layer: number of the layer, from 0; None for the middle one of the trace.

    Raises:
        BadInputError: the trace has no such layer between two others.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    chosen = _middle(trace.calls) if layer is None else layer
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, passes in enumerate(_PASSES, 1):
        start, end = period(trace.calls, passes, chosen)
        axes = figure.add_subplot(2, 1, place)
        _lanes(axes, trace, passes, start, end)
        axes.set_title(f"layer {chosen}, {'forward' if passes == 'fwd' else 'backward'}", loc="left", fontsize=10)
    figure.axes[-1].set_xlabel("ms")
    colours = {**{name: colour for name, (_, colour) in _CLASSES.items()}, **_WIRE}
    handles: Any = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colours), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def period(calls: list[Call], passes: str, layer: int | None = None) -> tuple[float, float]:
    """The times, in µs, at which a layer and the layer after it in the same pass begin.

    A layer begins when its first collective starts.

    Args:
        passes: ``fwd`` or ``bwd``.
        layer: number of the layer, from 0; None for the middle one of the trace.

    Raises:
        BadInputError: the trace has no such layer between two others.
    """
    chosen = _middle(calls) if layer is None else layer
    kind, step = _PASSES[passes]
    return _start(calls, kind, passes, chosen), _start(calls, kind, passes, chosen + step)


def _middle(calls: list[Call]) -> int:
    layers = sorted({call.layer for call in calls})
    return layers[len(layers) // 2]


def _start(calls: list[Call], kind: str, passes: str, layer: int) -> float:
    for call in calls:
        if call[:3] == (kind, passes, layer):
            return call.start
    raise BadInputError(f"the trace has no {kind} of layer {layer} in {passes}", "choose a layer between two others")


def _lanes(axes: Any, trace: Trace, passes: str, start: float, end: float) -> None:
    def bar(lane: int, first: float, last: float, colour: str, alpha: float = 1) -> tuple[float, float]:
        left, right = max(first, start), min(last, end)
        where = [((left - start) / 1e3, (right - left) / 1e3)]
        axes.broken_barh(where, (lane - 0.4, 0.8), facecolors=colour, alpha=alpha)
        return left, right

    for kernel in trace.computation:
        if kernel.start < end and kernel.end > start:
            bar(1, kernel.start, kernel.end, _colour(kernel))
    for call in trace.calls:
        if call.kind in _WIRE and call.passes == passes and call.start < end and call.end > start:
            colour = _WIRE[call.kind]
            left, right = bar(0, call.start, call.end, colour, 0.5 if call.copies else 1)
            for first, last in call.copies:
                if first < end and last > start:
                    bar(0, first, last, colour)
            middle = ((left + right) / 2 - start) / 1e3
            axes.text(middle, 0, f"{call.kind} {call.layer}", ha="center", va="center", fontsize=8)
    axes.set_yticks([0, 1], ["wire", "computation"])
    axes.set_xlim(0, (end - start) / 1e3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colour(kernel: Kernel) -> str:
    return next(colour for pattern, colour in _CLASSES.values() if pattern.search(kernel.name))


def main() -> None:
    """Prints how much of dispatch and combine computation hides in traces, and draws a layer with ``--picture``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="Chrome traces, one of each rank, or a directory")
    parser.add_argument("--picture", type=Path, help="draw one layer's forward and backward into this PNG")
    parser.add_argument("--layer", type=int, help="which layer to draw; default: the middle one")
    given = parser.parse_args()
    paths = files(given.files)
    traces = [read(path) for path in paths]
    if given.picture is not None:
        draw(traces[0], given.picture, given.layer)
    print(to_text(traces, paths))


if __name__ == "__main__":
    main()
