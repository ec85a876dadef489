"""Computes one-sided 95 % bounds for the difference of two models that answered the same questions.

A *gain* is a question that only the model answers correctly. A *loss* is a question that only its baseline answers
correctly. Questions on which the two agree only show how rare a disagreement is. Standard errors are not used: with few
questions, or where models rarely disagree, a bound of the form "difference minus 1.645 standard errors" is too high far
more often than in 5 % of cases.

One task: the exact unconditional test of Hsueh, Liu and Chen (Biometrics 57, 2001) with Tango's score statistic
(Statistics in Medicine 17, 1998). The share of questions on which the models disagree (the discordance) is unknown;
the p-value is the largest over all discordances in a 99.99 % confidence interval, plus the remaining 0.01 %
(Berger and Boos, JASA 89, 1994). Several tasks: a score test of the mean difference, each task having gains and
losses of its own, with a correction for counts being whole numbers.

A question with partial credit counts as that fraction of a gain or a loss. A whole gain or loss with the same mean
varies more than any partial credit does, so the bounds are then on the safe side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv, gammaln, xlog1py, xlogy

# The risk of a false "yes", one-sided, and the quantile of the normal distribution that goes with it.
ALPHA = 0.05
Z = 1.6448536269514722
# The probability that the interval of discordances leaves out. It is added to the p-value.
LEFT_OUT = 1e-4
# Bounds are found to this precision, and are rounded to the safe side.
PRECISION = 1e-5

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """The counts of two models' answers to one task from which the bounds of their difference follow.

    Attributes:
        gains, losses: sums of the differences above and below zero, in units of ``scale``; whole numbers where every
            answer is right or wrong.
        n: the number of questions.
        scale: the largest possible difference on one question, as a fraction; 1 for right and wrong.
    """

    gains: float
    losses: float
    n: int
    scale: float = 1.0


def count(items: Sequence[float], baseline: Sequence[float]) -> Counts:
    """Gains and losses of items (each from 0, mostly to 1) against those of the baseline, question by question."""
    ours, theirs = np.asarray(items, dtype=float), np.asarray(baseline, dtype=float)
    scale = max(1.0, float(ours.max()), float(theirs.max()))
    change = (ours - theirs) / scale
    return Counts(float(change.clip(min=0).sum()), float(-change.clip(max=0).sum()), len(change), scale)


def task_bounds(counts: Counts) -> tuple[float, float]:
    """The 95 % lower bound and the 95 % upper bound of the difference on one task, as fractions.

    Each bound by itself holds with 95 % confidence, and both together hold with 90 %.
    """
    # Fractions of a count are rounded to the disadvantage of the bound.
    low = _task_low(math.floor(counts.gains + 1e-9), math.ceil(counts.losses - 1e-9), counts.n)
    high = -_task_low(math.floor(counts.losses + 1e-9), math.ceil(counts.gains - 1e-9), counts.n)
    return counts.scale * low, counts.scale * high


def mean_bounds(tasks: Sequence[Counts]) -> tuple[float, float]:
    """As ``task_bounds``, for the mean difference over the tasks, each of which counts the same."""
    if len(tasks) == 1:
        return task_bounds(tasks[0])
    gains, losses, n, scale = (np.array([getattr(task, name) for task in tasks], dtype=float) for name in _FIELDS)
    return float(mean_low(gains, losses, n, scale)), -float(mean_low(losses, gains, n, scale))


_FIELDS = ("gains", "losses", "n", "scale")


def p_above(gains: int, losses: int, n: int, level: float) -> float:
    """The exact p-value of "the difference on this task is ``level`` or less", from -1 to 1 as a fraction."""
    if level <= -1:
        return 0.0
    if gains - losses <= n * level:
        return 1.0
    seen = gains + losses
    lowest = max(abs(level), float(betaincinv(seen, n - seen + 1, LEFT_OUT / 2)) if seen else 0.0)
    highest = float(betaincinv(seen + 1, n - seen, 1 - LEFT_OUT / 2)) if seen < n else 1.0
    if lowest > highest:
        return LEFT_OUT
    # The arc sine of a share has the standard error 0.5 / sqrt(n). The p-value is less smooth for fewer questions.
    ends = np.arcsin(np.sqrt([lowest, highest]))
    steps = math.ceil((16 if n < 1000 else 4) * math.sqrt(n) * (ends[1] - ends[0]))
    discordance = np.sin(np.linspace(ends[0], ends[1], steps + 2))[:, None] ** 2
    spread = 7 * math.sqrt(n * highest) + 25
    first, last = math.floor(max(0.0, n * lowest - spread)), min(n, math.ceil(n * highest + spread))
    disagreements = np.arange(first, last + 1, dtype=float)
    critical = _fewest_gains(disagreements, n, level, float(_tango(gains, losses, n, level)))
    share = ((discordance + level) / (2 * discordance)).clip(0, 1)
    reached = np.where(critical > 0, betainc(critical.clip(min=1), disagreements - critical + 1, share), 1.0)
    reached = np.where(critical > disagreements, 0.0, reached)
    log_choose = gammaln(n + 1) - gammaln(disagreements + 1) - gammaln(n - disagreements + 1)
    log_weight = log_choose + xlogy(disagreements, discordance) + xlog1py(n - disagreements, -discordance)
    return min(1.0, float((np.exp(log_weight) * reached).sum(axis=1).max()) + LEFT_OUT)


def _tango(gains: Array | float, losses: Array | float, n: float, level: float) -> Array:
    """Tango's score statistic of the difference against ``level``; it rises with gains and falls with losses."""
    middle = gains * (1 + level) + losses * (1 - level) - 2 * n * level
    root = np.sqrt(np.maximum(middle**2 + 8 * n * losses * level * (1 - level), 0))
    lost = (middle + root) / (4 * n)  # most likely share of losses if the difference is ``level``
    variance = n * (2 * lost + level - level**2)
    return (gains - losses - n * level) / np.sqrt(np.maximum(variance, 1e-300))


def _fewest_gains(disagreements: Array, n: int, level: float, statistic: float) -> Array:
    """The fewest gains among each number of disagreements that give a score of at least ``statistic``.

    Where no number of gains does, the result is the number of disagreements plus one.
    """
    low, high = np.zeros_like(disagreements), disagreements + 1
    while (low < high).any():
        middle = np.floor((low + high) / 2)
        enough = _tango(middle, disagreements - middle, n, level) >= statistic - 1e-9
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    return low


def _task_low(gains: int, losses: int, n: int) -> float:
    """The lower bound: the largest difference for which a test shows that the true difference lies above it."""
    losses = min(losses, n - gains)
    estimate = (gains - losses) / n
    if p_above(gains, losses, n, PRECISION - 1) > ALPHA:
        return -1.0
    level: Any = brentq(
        lambda level: p_above(gains, losses, n, level) - ALPHA, PRECISION - 1, estimate, xtol=PRECISION / 4
    )
    return max(-1.0, float(level) - PRECISION)


def mean_low(gains: Array, losses: Array, n: Array, scale: Array) -> Array:
    """The 95 % lower bound of the mean difference over tasks, by a score test with continuity correction.

    Each level of the mean difference is tested with the most likely shares of gains and losses, task by task, that
    have this mean; they give the variance. All such shares belong to one Lagrange multiplier, which is searched for:
    the larger it is, the lower is the level.

    Args:
        gains, losses: ``[..., tasks]``; ``n`` and ``scale``: ``[tasks]``. See ``Counts``.

    Returns:
        ``[...]``, fractions.
    """
    observed = ((gains - losses) / n * scale).mean(-1)
    low, high = np.zeros_like(observed), np.full_like(observed, 1e6 * float(n.max()))
    level = observed
    for _ in range(36):
        middle = np.sqrt((low + 1e-6) * high)
        gained, lost = _shares(gains, losses, n, middle[..., None] * scale)
        level = ((gained - lost) * scale).mean(-1)
        variance = (gained + lost - (gained - lost) ** 2) / np.maximum(n - 1, 1) * scale**2 / len(n) ** 2
        total = np.maximum(variance.sum(-1), 1e-300)
        # Half the usual step of the observed mean: the step of each task counts as much as its variance.
        correction = 0.5 * (variance * scale / n).sum(-1) / len(n) / total
        refused = (observed - level - correction) >= Z * np.sqrt(total)
        low, high = np.where(refused, low, middle), np.where(refused, middle, high)
    return np.maximum(level - PRECISION, -scale.mean())


def _shares(gains: Array, losses: Array, n: Array, pull: Array) -> tuple[Array, Array]:
    """The most likely shares of gains and losses when differences are pulled down by a Lagrange multiplier.

    They are ``gains / (m + pull)`` and ``losses / (m - pull)``, and ``agreements / m`` of the rest; ``m`` is such that
    they sum to one.
    """
    agreements = n - gains - losses
    low, high = pull, pull + n
    for _ in range(36):
        m = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            total = agreements / m + gains / (m + pull) + np.where(losses > 0, losses / (m - pull), 0.0)
        low, high = np.where(total > 1, m, low), np.where(total > 1, high, m)
    gained = gains / (high + pull)
    return gained, (1 - agreements / high - gained).clip(0, 1)
