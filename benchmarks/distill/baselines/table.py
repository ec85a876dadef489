"""Formats what the comparison with public trainers measured."""

import statistics
from typing import Any

from benchmarks.turns import ratio

from fcsd.bench import runner

OWN = "fcsd"  # the name of fcsd's own side


def told(visit: dict[str, Any], result: dict[str, Any]) -> str:
    """A line about one visit: tokens per second, peak memory above weights and optimizer, and the first loss."""
    head = f"{visit['side']:12s} micro-batch {visit['micro_batch']:3d}"
    if visit["out_of_memory"]:
        return f"{head}: out of memory"
    speed = result["batch_tokens"] / visit["seconds"]
    above = _gib(_above(visit, result)) or "-"
    return f"{head}: {speed:,.0f} tokens/s, {above} GiB above, loss {visit['loss']:.6g}"


def table(result: dict[str, Any]) -> str:
    """Formats the turns as a table with a line for each side, and the bound.

    The columns are the micro-batch; the median step; half its range, if there were several turns; tokens per second;
    those of fcsd divided by them; the share of the bound; peak memory above weights and optimizer; that of fcsd divided
    by it, at the best micro-batch of fcsd and at that of this side; and the shares of the time spent waiting: for data,
    and, in a traced step, for communication and for the host.
    """
    lines: dict[str, dict[str, str | None]] = {}
    by_side: dict[str, list[dict[str, Any]]] = {}
    for turn in result["turns"]:
        if not turn["out_of_memory"]:
            by_side.setdefault(turn["side"], []).append(turn)
    medians = {name: statistics.median(turn["seconds"] for turn in turns) for name, turns in by_side.items()}
    # The same micro-batches of fcsd as those at which the other sides were fastest.
    own = {v["micro_batch"]: v for v in result["sweep"] if v["side"] == OWN and not v["out_of_memory"]}
    for name, turns in by_side.items():
        seconds, micro = [turn["seconds"] for turn in turns], turns[0]["micro_batch"]
        speed, above = result["batch_tokens"] / medians[name], _above(turns[-1], result)
        waits = {"data": statistics.median(turn["data_wait"] for turn in turns)}
        waits |= {"comm": turns[-1]["exposed"], "host": turns[-1]["idle"]}
        lines[name] = {
            "micro": f"{micro}",
            "step ms": f"{medians[name] * 1e3:.1f}",
            "± ms": f"{(max(seconds) - min(seconds)) / 2 * 1e3:.1f}" if len(turns) > 1 else None,
            "tokens/s": f"{speed:,.0f}",
            "fcsd x": ratio(medians[name], medians.get(OWN), ".3f"),
            "of bound": ratio(speed, result["bound"]),
            "GiB above": _gib(above),
            "fcsd mem": ratio(_above(by_side[OWN][-1], result) if OWN in by_side else None, above),
            "same mb": ratio(_above(own[micro], result) if micro in own else None, above),
            **{title: None if share is None else f"{share:.1%}" for title, share in waits.items()},
        }
    if result["bound"]:
        step = result["batch_tokens"] / result["bound"] * 1e3
        lines["bound"] = {"step ms": f"{step:.1f}", "tokens/s": f"{result['bound']:,.0f}"}
    return runner.table(lines)


def _above(visit: dict[str, Any], result: dict[str, Any]) -> int | None:
    """The peak memory of a visit above weights and optimizer, in bytes; None if it was not measured."""
    return None if visit["peak"] is None else visit["peak"] - result["held"]


def _gib(size: int | None) -> str | None:
    return None if size is None else f"{size / 2**30:.2f}"
