"""Computes estimates with standard errors from the results of single items, for one model or for paired models.

Every metric here is a ratio of sums over items: an accuracy counts hits over items, a held-out loss sums
negative log-likelihoods over tokens. An item is a number (denominator one) or a pair (numerator, denominator).
Standard errors are the analytic ones of the ratio estimator (linearisation); for plain means that is the
usual s / sqrt(n).
"""

import math
from collections.abc import Sequence

Item = float | Sequence[float]


def _pairs(items: Sequence[Item]) -> list[tuple[float, float]]:
    return [(float(i), 1.0) if isinstance(i, int | float) else (float(i[0]), float(i[1])) for i in items]


def _influence(items: Sequence[Item]) -> tuple[float, list[float]]:
    """The ratio, and the influence of each item on it; the influences sum to zero."""
    pairs = _pairs(items)
    total = sum(denominator for _, denominator in pairs)
    ratio = sum(numerator for numerator, _ in pairs) / total
    scale = len(pairs) / total
    return ratio, [(numerator - ratio * denominator) * scale for numerator, denominator in pairs]


def _stderr(pulls: Sequence[float]) -> float:
    n = len(pulls)
    return math.sqrt(sum(p * p for p in pulls) / (n - 1) / n) if n > 1 else math.nan


def spread(total: int, limit: int | None) -> list[int]:
    """Which of ``total`` questions are asked if only ``limit`` are: evenly spread ones, in order.

    Data sets have an order: HellaSwag's, for example, begins with a thousand short questions about videos.
    """
    return list(range(total)) if limit is None or limit >= total else [i * total // limit for i in range(limit)]


def estimate(items: Sequence[Item]) -> tuple[float, float]:
    """``(value, standard error)``; the error of a single item is NaN."""
    ratio, pulls = _influence(items)
    return ratio, _stderr(pulls)


def paired_difference(items: Sequence[Item], baseline: Sequence[Item]) -> tuple[float, float]:
    """``(value - baseline's value, its standard error)`` where items of equal index are the same question."""
    ratio, pulls = _influence(items)
    reference, reference_pulls = _influence(baseline)
    return ratio - reference, _stderr([a - b for a, b in zip(pulls, reference_pulls, strict=True)])


def share_recovered(
    items: Sequence[Item], baseline: Sequence[Item], floor: Sequence[Item] | float
) -> tuple[float, float]:
    """``((value - floor) / (baseline - floor), its standard error)``: 0 at the floor, 1 at the baseline.

    Args:
        floor: items of a third model on the same questions, or a fixed level such as chance.
    """
    value, pulls = _influence(items)
    top, top_pulls = _influence(baseline)
    bottom, bottom_pulls = (floor, [0.0] * len(pulls)) if isinstance(floor, int | float) else _influence(floor)
    share = (value - bottom) / (top - bottom)
    moved = zip(pulls, top_pulls, bottom_pulls, strict=True)
    return share, _stderr([(p - f - share * (t - f)) / (top - bottom) for p, t, f in moved])
