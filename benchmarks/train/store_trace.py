"""Cut a trace of `fcsd bench step --trace` down to a few layers and store it with HolisticTraceAnalysis's figure.

    python benchmarks/train/store_trace.py OUT/rank-0.json.gz tests/data/h200.json.gz [--layer 4] [--picture PNG]

Kept are the kernels and copies from the collective that begins one layer to the one that begins the next, in forward
and in backward, with their launches and fcsd's ranges: some ten kilobytes. HTA's percentage of the cut trace goes into
`hta.json` beside it, under the file's name, where tests/parallel/test_trace.py finds both. HTA (`pip install
HolisticTraceAnalysis`) is needed here alone. With `--picture` the layer is drawn as FarSkip Figures 9
and 10 are, from the cut trace.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.train.trace import draw, period

from fcsd.parallel import trace

_ARGUMENTS = ("correlation", "device", "stream")


def cut(path: Path, layer: int | None) -> dict[str, Any]:
    """The Chrome trace of one layer; None for the middle one."""
    content = trace.read_content(path)
    calls = trace.read(path).calls
    periods = [period(calls, passes, layer) for passes in ("fwd", "bwd")]
    events = content["traceEvents"]
    device = [
        event
        for event in events
        if event.get("cat") in trace.ON_DEVICE
        and any(event["ts"] <= end and event["ts"] + event["dur"] >= start for start, end in periods)
    ]
    numbers = {event["args"].get("correlation") for event in device}
    launches = [e for e in events if e.get("cat") in trace.LAUNCHES and e["args"].get("correlation") in numbers]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and trace.RANGE.fullmatch(e["name"])]
    for event in [*device, *launches, *ranges]:
        event["args"] = {name: event["args"][name] for name in _ARGUMENTS if name in event.get("args", {})}
    kept = {name: content[name] for name in ("schemaVersion", "deviceProperties", "distributedInfo") if name in content}
    return {**kept, "traceEvents": [*ranges, *launches, *device]}


def hta_figure(path: Path) -> float:
    """The result of HTA's ``get_comm_comp_overlap`` for one rank's trace, in per cent."""
    from hta.trace_analysis import TraceAnalysis  # pyright: ignore[reportMissingImports]

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
    return float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])


def main() -> None:
    """Parse the command line, cut the trace, compute HTA's figure, and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layer", type=int, help="0-based; default: the middle one")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    args.out.write_bytes(gzip.compress(json.dumps(cut(args.trace, args.layer)).encode(), mtime=0))
    figures = args.out.parent / "hta.json"
    known = json.loads(figures.read_text()) if figures.exists() else {}
    known[args.out.name] = hta_figure(args.out)
    figures.write_text(json.dumps(known, indent=1) + "\n")
    stored = trace.read(args.out)
    print(f"{args.out}: {args.out.stat().st_size} bytes; HTA {known[args.out.name]}, ours {trace.hta_overlap(stored)}")
    if args.picture is not None:
        draw(stored, args.picture, args.layer)


if __name__ == "__main__":
    main()
