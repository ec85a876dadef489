"""Formats what the benchmark of the training step measured."""

import statistics
from typing import Any

from fcsd.bench.training.workload import BOUND, FUSED, STANDARD, STOCK
from fcsd.parallel import trace


def headline(traces: list[trace.Trace], ceiling: dict[str, tuple[float, float]]) -> str:
    """Formats the hidden share of communication in each pass, as the paper defines it, and the ceiling of this share.

    Both are given with and without the last layer's combine, which no computation can hide.
    """
    found, trimmed = trace.overlaps(traces), trace.overlaps(traces, without_last=True)
    return "\n".join(
        f"{passes}: {found['all', passes].share:.1%} hidden, at most {most:.1%} can be; "
        f"without the last layer's combine {trimmed['all', passes].share:.1%} of at most {most_without:.1%}"
        for passes, (most, most_without) in ceiling.items()
    )


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Formats a line for each variant: median times ± half the distance between the quartiles, and its relative speed.

    The speed is given relative to stock, relative to the standard wiring, and relative to the variant's bound, which
    sends nothing and rounds nothing. The bytes are those that rank 0 sends to others in a step.
    """
    steps = {name: statistics.median(found["step"]) for name, found in measured.items()}
    width = max(16, *map(len, measured))
    titles = f"{'fwd+bwd ms':>18s} {'step ms':>18s} {'x stock':>8s} {'x std':>8s} {'of bound':>9s}"
    lines = [f"{'':{width}s} {titles} {'peak GiB':>9s} {'sent MiB':>9s}"]
    for name, found in measured.items():
        columns = [
            f"{statistics.median(found[k]):9.1f} ± {_spread(found[k]):6.1f}" for k in ("forward_backward", "step")
        ]
        fused = FUSED if name.partition("+")[0].endswith(FUSED) else ""
        others = (STOCK, STANDARD + fused)
        ratios = [f"{steps[of] / steps[name]:8.3f}" if of in steps else f"{'-':>8s}" for of in others]
        bound = f"{steps[BOUND + fused] / steps[name]:9.1%}" if BOUND + fused in steps else f"{'-':>9s}"
        sent = f"{found['sent_bytes'] / 2**20:9.1f}" if found["sent_bytes"] else f"{'-':>9s}"
        times = f"{columns[0]:>18s} {columns[1]:>18s} {' '.join(ratios)} {bound}"
        lines.append(f"{name:{width}s} {times} {found['peak_gib']:9.1f} {sent}")
    return "\n".join(lines)


def _spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2
