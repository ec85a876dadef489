"""The table of what the benchmark of a step measured."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.train.step.workload import BOUND, FUSED, STANDARD, STOCK
from benchmarks.turns import ratio, spread

from fcsd.bench import runner


def table(
    variants: Mapping[str, Mapping[str, Any]],
    batch_tokens: int,
    full_speed: float | None = None,
    accounts: Mapping[str, Any] | None = None,
) -> str:
    """Formats a line for each variant. A column that was measured for none of them is left out.

    The columns are: the median ms of forward and backward pass and of the whole step, each ± half the distance between
    the quartiles; the speed relative to stock and to the standard wiring; tokens per second; the share of the speed of
    the bound, which sends nothing and rounds nothing; MFU; the share of time spent waiting for data; the shares of a
    traced step in which only communication ran (``comm.``) and in which the device waited for the host (``host``); peak
    memory; and what rank 0 sends to others in dispatch and combine of a step. A fused variant is compared with fused
    ones.

    Args:
        variants: name -> what ``measure.bench`` says.
        batch_tokens: tokens of a step, over all processes.
        full_speed: tokens per second at the GPUs' peak FLOP/s, if it is known.
        accounts: name -> the account of a traced step of rank 0.
    """
    steps = {name: statistics.median(found["step"]) for name, found in variants.items()}

    def cells(name: str, found: Mapping[str, Any]) -> dict[str, str | None]:
        fused = FUSED if name.partition("+")[0].endswith(FUSED) else ""
        speed, sent = batch_tokens / steps[name] * 1e3, found.get("sent_bytes")
        waits, peak = found.get("data_wait"), found.get("peak_gib")
        account = (accounts or {}).get(name)
        return {
            "fwd+bwd ms": _times(found["forward_backward"]) if "forward_backward" in found else None,
            "step ms": _times(found["step"]),
            "x stock": ratio(steps.get(STOCK), steps[name], ".3f"),
            "x std": ratio(steps.get(STANDARD + fused), steps[name], ".3f"),
            "tokens/s": f"{speed:,.0f}",
            "of bound": ratio(steps.get(BOUND + fused), steps[name]),
            "MFU": ratio(speed, full_speed),
            "data": f"{statistics.median(waits):.1%}" if waits else None,
            **{title: _share(account, state) for title, state in (("comm.", "exposed"), ("host", "idle"))},
            "peak GiB": None if peak is None else f"{peak:.1f}",
            "sent MiB": f"{sent / 2**20:.1f}" if sent else None,
        }

    return runner.table({name: cells(name, found) for name, found in variants.items()})


def _times(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ± {spread(values):.1f}"


def _share(account: Mapping[str, Any] | None, state: str) -> str | None:
    """The share of a traced step that the timeline of the device was in ``state``."""
    if account is None:
        return None
    return f"{sum(phase[state] for phase in account['phases'].values()) / account['total']:.1%}"
