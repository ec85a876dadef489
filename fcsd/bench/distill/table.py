"""Formats what the benchmark of the distillation step measured."""

import statistics
from typing import Any

from fcsd.bench.distill.workload import BOUND


def table(result: dict[str, Any]) -> str:
    """Formats the result as a table with a line for each variant.

    The columns are the median step, half its range, tokens per second, the share of the bound's speed, MFU, the share
    of time spent waiting for data, and peak memory. ``comm.`` and ``host`` are shares of the traced step of rank 0, if
    there is one: the time in which only communication ran, and the time in which the device waited for the host.
    """
    medians = {name: statistics.median(found["seconds"]) for name, found in result["variants"].items()}
    titles = ("step ms", "± ms", "tokens/s", "of bound", "MFU", "data", "comm.", "host", "peak GiB")
    width = max(12, *map(len, medians))
    lines = [f"{'':{width}s} " + " ".join(f"{title:>9s}" for title in titles)]
    for name, found in result["variants"].items():
        bound = f"{medians[BOUND] / medians[name]:9.1%}" if BOUND in medians else f"{'-':>9s}"
        speed = result["batch_tokens"] / medians[name]
        spread = (max(found["seconds"]) - min(found["seconds"])) / 2 * 1e3
        mfu = f"{speed / result['full_speed']:9.1%}" if result["full_speed"] else f"{'-':>9s}"
        data = statistics.median(found["data_wait"])
        waits = " ".join(_share(result.get("accounts", {}).get(name), state) for state in ("exposed", "idle"))
        peak = f"{found['peak_gib']:9.1f}" if "peak_gib" in found else f"{'-':>9s}"
        times = f"{medians[name] * 1e3:9.1f} {spread:9.1f} {speed:9,.0f}"
        lines.append(f"{name:{width}s} {times} {bound} {mfu} {data:9.1%} {waits} {peak}")
    return "\n".join(lines)


def _share(account: dict[str, Any] | None, state: str) -> str:
    """The share of a traced step that the timeline of the device was in ``state``."""
    if account is None:
        return f"{'-':>9s}"
    return f"{sum(phase[state] for phase in account['phases'].values()) / account['total']:9.1%}"
