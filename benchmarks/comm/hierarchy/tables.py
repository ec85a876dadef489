"""Short tables of what the benchmark has measured."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.comm.hierarchy.ways import DEDUP_OF

from fcsd.markdown import table

_WAYS = ("flat", "2DH", "HD1", "HD2")
NEAR_BEST = 0.03  # a choice within this of the best way counts as good


def of_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds of each way, the wire alone in brackets, and the ratios of the targets."""
    rows = []
    for one in points:
        seconds = one["seconds"]
        cells = [f"{1e3 * seconds[way]:.2f} ({1e3 * seconds[f'{way}, wire']:.2f})" for way in _WAYS]
        ratios = [f"{seconds[way] / seconds['HD2']:.2f}x" for way in ("flat", "2DH", "HD1")]
        rows.append([f"{one['top_k']} of {one['experts']}", *cells, *ratios, f"{worst_error([one]):.1%}"])
    head = [
        "top k",
        *(f"{way}, ms (wire)" for way in _WAYS),
        "flat / HD2",
        "2DH / HD2",
        "HD1 / HD2",
        "worst prediction",
    ]
    return table(head, rows, left=1)


def worst_error(points: Sequence[Mapping[str, Any]]) -> float:
    """The largest relative error of a prediction."""
    return max(_errors(points))


def _errors(points: Sequence[Mapping[str, Any]]) -> list[float]:
    return [abs(one["predicted"][way] / one["seconds"][way] - 1) for one in points for way in _WAYS]


def of_sweep(points: Sequence[Mapping[str, Any]]) -> str:
    """How often the model chose the best way or one within 3 % of it, and how far its predictions were off."""
    losses = [one["seconds"][one["chosen"]] / one["seconds"][one["best"]] - 1 for one in points]
    errors = sorted(_errors(points))
    best = {way: sum(one["best"] == way for one in points) for way in DEDUP_OF}
    return (
        f"{len(points)} points; the best way was "
        + ", ".join(f"{way} {count} times" for way, count in best.items())
        + f". The choice was the best one {sum(loss == 0 for loss in losses)} times and within {NEAR_BEST:.0%} of it "
        + f"{sum(loss <= NEAR_BEST for loss in losses)} times; at worst it took {1 + max(losses):.2f} times as long.\n"
        + f"Predictions: median error {statistics.median(errors):.1%}, within 10 % in "
        + f"{sum(error <= 0.1 for error in errors) / len(errors):.0%}, worst {errors[-1]:.1%}."
    )


def of_study(found: Mapping[str, Any]) -> str:
    """The ablations: milliseconds with the wire alone in brackets, and ratios of wires to flat or to HD2 unmoved."""
    columns = ("flat", "2DH", "HD1", "HD2", "d*", "d* + swap")
    rows = [
        [str(row["top_k"]), row["chosen"], *(f"{_both(row, way)} {_ratio(row, 'flat', row, way)}" for way in columns)]
        for row in found["top_k"]
    ]
    head = ["top k", "d*", *(f"{name}, ms (wire), flat's wire over it" for name in columns)]
    parts = [table(head, rows, left=2)]
    for kind in ("period", "balance"):
        rows = [
            [
                row[kind],
                _both(row, "HD2"),
                _ratio(_unmoved(found, row), "HD2", row, "HD2"),
                ", ".join(map(str, row["swaps"])),
                f"{statistics.mean(row['search']):.3f}",
            ]
            for row in found[kind]
        ]
        head = [kind, "HD2, ms (wire)", "HD2's wire without swaps over it", "swaps of each search", "a search, s"]
        parts.append(table(head, rows, left=1))
    return "\n\n".join(parts)


def _both(row: Mapping[str, Any], way: str) -> str:
    return f"{1e3 * row[way]:.2f} ({1e3 * row[f'{way}, wire']:.2f})"


def _ratio(one: Mapping[str, Any], way: str, other: Mapping[str, Any], other_way: str) -> str:
    return f"{one[f'{way}, wire'] / other[f'{other_way}, wire']:.2f}x"


def _unmoved(found: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row without swaps for the routing of a row."""
    return next(one for one in found["top_k"] if one["top_k"] == row["top_k"])
