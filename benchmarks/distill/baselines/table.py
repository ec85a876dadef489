"""Formats what the comparison with public trainers measured."""

import statistics
from typing import Any

OWN = "fcsd"  # the name of fcsd's own side

_NONE = f"{'-':>9s}"
_TITLES = ("micro", "step ms", "± ms", "tokens/s", "fcsd x", "of bound", "GiB above", "fcsd mem", "same mb")
_WAITS = ("data", "comm", "host")


def told(visit: dict[str, Any], result: dict[str, Any]) -> str:
    """A line about one visit: tokens per second, peak memory above weights and optimizer, and the first loss."""
    head = f"{visit['side']:12s} micro-batch {visit['micro_batch']:3d}"
    if visit["out_of_memory"]:
        return f"{head}: out of memory"
    speed = result["batch_tokens"] / visit["seconds"]
    above = _gib(_above(visit, result))
    return f"{head}: {speed:9,.0f} tokens/s, {above} GiB above, loss {visit['loss']:.6g}"


def table(result: dict[str, Any]) -> str:
    """Formats the turns as a table with a line for each side, and the bound.

    The columns are the micro-batch; the median step; half its range, if there were several turns; tokens per second;
    those of fcsd divided by them; the share of the bound; peak memory above weights and optimizer; that of fcsd divided
    by it, at the best micro-batch of fcsd and at that of this side; and the shares of the time spent waiting: for data,
    and, in a traced step, for communication and for the host.
    """
    lines = [f"{'':12s} " + " ".join(f"{title:>9s}" for title in (*_TITLES, *_WAITS))]
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
        columns = [
            f"{micro:9d}",
            f"{medians[name] * 1e3:9.1f}",
            f"{(max(seconds) - min(seconds)) / 2 * 1e3:9.1f}" if len(turns) > 1 else _NONE,
            f"{speed:9,.0f}",
            f"{medians[name] / medians[OWN]:9.3f}" if OWN in medians else _NONE,
            _share(speed, result["bound"]),
            _gib(above),
            _share(_above(by_side[OWN][-1], result) if OWN in by_side else None, above),
            _share(_above(own[micro], result) if micro in own else None, above),
            f"{statistics.median(turn['data_wait'] for turn in turns):9.1%}",
            *(_NONE if turns[-1][key] is None else f"{turns[-1][key]:9.1%}" for key in ("exposed", "idle")),
        ]
        lines.append(f"{name:12s} " + " ".join(columns))
    if result["bound"]:
        step = result["batch_tokens"] / result["bound"] * 1e3
        lines.append(f"{'bound':12s} {'':9s} {step:9.1f} {'':9s} {result['bound']:9,.0f}")
    return "\n".join(lines)


def _above(visit: dict[str, Any], result: dict[str, Any]) -> int | None:
    """The peak memory of a visit above weights and optimizer, in bytes; None if it was not measured."""
    return None if visit["peak"] is None else visit["peak"] - result["held"]


def _gib(size: int | None) -> str:
    return _NONE if size is None else f"{size / 2**30:9.2f}"


def _share(part: float | None, whole: float | None) -> str:
    return _NONE if part is None or not whole else f"{part / whole:9.1%}"
