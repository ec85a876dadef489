"""Turns the stored lines into scores: means over seeds with paired standard errors, and the fit over tokens.

All differences are paired: every model answered the same questions. A method's answer to a question is the mean over
its seeds. A standard error combines the spread over questions with that over seeds, as independent parts; with one
seed it is that over questions alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

import numpy as np
from studies.capability.results import unpacked

from fcsd.eval.perplexity import HELD_OUT
from fcsd.eval.statistics import Item, paired_difference, share_recovered

Estimate = tuple[float, float]
MINIMUM = 1e-3  # the smallest share that is missing in a fit of a power law
DRAWS = 2000


@dataclass(frozen=True)
class Scores:
    """What the seeds of one method reached, against the teacher and the untrained conversion.

    Attributes:
        tasks: benchmark -> score in points.
        below: benchmark, or ``Avg`` -> points below (negative) or above the teacher, with the standard error.
        of_teacher: the average as a share of the teacher's.
        above_chance: the mean over benchmarks of (score - chance) / (teacher - chance).
        won_back: the mean of (score - untrained) / (teacher - untrained), over benchmarks that lost something.
        loss_won_back: the same for the held-out loss.
        seconds: the mean time in steps; None without training.
        seeds: the number of models.
    """

    tasks: dict[str, float]
    below: dict[str, Estimate]
    of_teacher: Estimate
    above_chance: Estimate
    won_back: Estimate | None
    loss_won_back: Estimate | None
    seconds: float | None
    seeds: int


def by_column(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of a line by benchmark, with the held-out loss."""
    return {result["column"]: unpacked(result) for result in line["results"]}


def scores_of(lines: Sequence[dict[str, Any]], teacher: dict[str, Any], untrained: dict[str, Any]) -> Scores:
    """The scores of models that differ in the seed alone.

    Raises:
        ValueError: the models did not answer the same questions as the teacher.
    """
    top, floor = by_column(teacher), by_column(untrained)
    found = [by_column(line) for line in lines]
    for own in [floor, *found]:
        for column, result in top.items():
            for key in ("settings_sha256", "data_sha256", "n"):
                if own[column][key] != result[key]:
                    raise ValueError(f"{column}: the models were scored on different questions ({key})")
    columns = [column for column in top if column != HELD_OUT]
    tasks, below, chance_corrected, recovered = {}, {}, [], []
    for column in columns:
        answers = [own[column]["items"] for own in found]
        reference = top[column]["items"]
        tasks[column] = 100 * sum(own[column]["value"] for own in found) / len(found)
        below[column] = _over_seeds(answers, lambda items, b=reference: _points(paired_difference(items, b)))
        chance = (top[column]["chance"] or 0) / 100
        chance_corrected.append(_over_seeds(answers, lambda items, b=reference, c=chance: share_recovered(items, b, c)))
        lost, noise = paired_difference(reference, floor[column]["items"])
        if lost > 2 * noise:
            level = floor[column]["items"]
            recovered.append(_over_seeds(answers, lambda items, b=reference, f=level: share_recovered(items, b, f)))
    below["Avg"] = _mean(list(below.values()))
    average = 100 * sum(top[column]["value"] for column in columns) / len(columns)
    loss_won_back = None
    if HELD_OUT in top:
        texts = [own[HELD_OUT]["items"] for own in found]
        lost, noise = paired_difference(floor[HELD_OUT]["items"], top[HELD_OUT]["items"])
        if lost > 2 * noise:
            reference, level = top[HELD_OUT]["items"], floor[HELD_OUT]["items"]
            loss_won_back = _over_seeds(texts, lambda items: share_recovered(items, reference, level))
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    return Scores(
        tasks=tasks,
        below=below,
        of_teacher=(1 + below["Avg"][0] / average, below["Avg"][1] / average),
        above_chance=_mean(chance_corrected),
        won_back=_mean(recovered) if recovered else None,
        loss_won_back=loss_won_back,
        seconds=sum(seconds) / len(seconds) if seconds else None,
        seeds=len(lines),
    )


def _points(estimate: Estimate) -> Estimate:
    return 100 * estimate[0], 100 * estimate[1]


def _over_seeds(answers: Sequence[Sequence[Item]], measure: Any) -> Estimate:
    """``measure`` of the answers' means over seeds; the error has the parts of questions and of seeds."""
    value, over_questions = measure(_means(answers))
    if len(answers) == 1:
        return value, over_questions
    return value, math.hypot(over_questions, stdev(measure(items)[0] for items in answers) / math.sqrt(len(answers)))


def _means(answers: Sequence[Sequence[Item]]) -> list[Item]:
    means: list[Item] = []
    for items in zip(*answers, strict=True):
        values = [item if isinstance(item, int | float) else item[0] for item in items]
        mean = sum(values) / len(values)
        means.append(mean if isinstance(items[0], int | float) else (mean, items[0][1]))
    return means


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    values, errors = zip(*estimates, strict=True)
    return sum(values) / len(values), math.hypot(*errors) / len(errors)


@dataclass(frozen=True)
class Fit:
    """The share that is missing, ``1 - share``, as a power law of the training tokens: ``exp(a) * tokens ** b``.

    Attributes:
        draws: ``a`` and ``b`` of fits to points that were moved by their standard errors, ``[draws, 2]``.
    """

    a: float
    b: float
    draws: np.ndarray

    def at(self, tokens: float) -> tuple[float, float, float]:
        """The share at a number of tokens, and the bounds of its central 95 % over the draws."""
        missing = np.exp(self.draws[:, 0] + self.draws[:, 1] * math.log(tokens))
        low, high = np.quantile(1 - missing, [0.025, 0.975])
        return 1 - math.exp(self.a + self.b * math.log(tokens)), float(low), float(high)


def fit(points: Sequence[tuple[float, Estimate]]) -> Fit:
    """Fits the power law to (tokens, share) by least squares in logarithms, each weighted by its error.

    A share of 1 or more counts as ``1 - MINIMUM``, because a power law never reaches 1.
    """
    tokens = np.log([float(at) for at, _ in points])
    shares = np.array([share for _, (share, _) in points])
    errors = np.array([max(error, MINIMUM) for _, (_, error) in points])

    def solve(values: np.ndarray) -> tuple[float, float]:
        missing = np.maximum(1 - values, MINIMUM)
        b, a = np.polyfit(tokens, np.log(missing), 1, w=missing / errors)
        return float(a), float(b)

    generator = np.random.default_rng(0)
    moved = [solve(shares + errors * generator.standard_normal(len(shares))) for _ in range(DRAWS)]
    a, b = solve(shares)
    return Fit(a, b, np.array(moved))


def tokens_to(share: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The tokens at which a share is first reached, interpolated in log(tokens); None if no point reaches it.

    Args:
        points: (tokens, share), ascending in tokens.
    """
    before: tuple[float, float] | None = None
    for tokens, value in points:
        if value >= share:
            if before is None:
                return tokens
            part = (share - before[1]) / (value - before[1])
            return math.exp(math.log(before[0]) + part * math.log(tokens / before[0]))
        before = tokens, value
    return None
