"""Models against their baseline, question by question: differences, what was won back, and one verdict.

Two models that answered the same questions are compared by their differences per question, whose standard error
is several times smaller than that of either score.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fcsd.errors import ConfigError, VerdictError
from fcsd.eval.perplexity import HELD_OUT
from fcsd.eval.results import Row, is_accuracy
from fcsd.eval.statistics import paired_difference, share_recovered

# One-sided 95 % of the normal distribution.
Z = 1.645
YES, NO, UNDECIDED = "yes", "no", "not enough samples"


@dataclass(frozen=True)
class Difference:
    """A model minus its baseline, in points, and the difference's standard error.

    Attributes:
        recovery: how far the score is from the floor (0) to the baseline (1), with its standard error. The floor
            is chance or the untrained conversion's score, whichever is higher. None where the baseline is
            itself within two standard errors of the floor: there is nothing to win back. Overall, the mean of
            the benchmarks that have one.
    """

    column: str
    points: float
    stderr: float
    recovery: tuple[float, float] | None = None

    def verdict(self, margin: float) -> str:
        """Whether the model is at most ``margin`` points below its baseline: yes, no or not enough samples.

        Yes or no is said with 95 % confidence, one-sided.
        """
        if self.points - Z * self.stderr >= -margin:
            return YES
        return NO if self.points + Z * self.stderr < -margin else UNDECIDED


@dataclass(frozen=True)
class Comparison:
    """A model against its baseline.

    Attributes:
        tasks: one difference per benchmark.
        overall: the mean over the benchmarks, each counting the same, as Table 1's Avg.
        loss: the difference in held-out loss in nats per token, standard error, and the share of the untrained
            conversion's lost loss that was won back with its standard error; None without a held-out text.
    """

    model: str
    baseline: str
    tasks: tuple[Difference, ...]
    overall: Difference | None
    loss: Difference | None

    def sentence(self, margin: float) -> str:
        """The verdict in words."""
        if self.overall is None:
            return f"{self.model}: no benchmark to compare on"
        points = f"{self.overall.points:+.1f} ± {self.overall.stderr:.1f}"
        return f"{self.model} within {margin:g} points of {self.baseline}: {self.overall.verdict(margin)} ({points})"

    def to_json(self, margin: float) -> dict[str, Any]:
        """Plain data, verdicts against ``margin`` included."""

        def plain(difference: Difference | None) -> dict[str, Any] | None:
            if difference is None:
                return None
            return {**vars(difference), "verdict": difference.verdict(margin)}

        return {
            "model": self.model,
            "baseline": self.baseline,
            "margin": margin,
            "tasks": [plain(task) for task in self.tasks],
            "overall": plain(self.overall),
            "loss": None if self.loss is None else vars(self.loss),
        }


def compare_models(rows: Sequence[Row], *, untrained: str | None = None) -> list[Comparison]:
    """Compare every model with the one whose rows are marked as baseline.

    Args:
        rows: as ``evaluate_models`` returns them.
        untrained: the name of the untrained conversion among the models, for the recoveries.

    Raises:
        ConfigError: no baseline, an unknown ``untrained``, or models that did not answer the same questions
            under the same settings.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    baseline = next((row["model"] for row in rows if row["baseline"]), None)
    if baseline is None:
        raise ConfigError("there is no baseline to compare with", "name one with --baseline")
    if untrained is not None and untrained not in models:
        raise ConfigError(f"no model {untrained!r} was evaluated", f"there are: {', '.join(models)}")
    by_model = {model: {row["column"]: row for row in rows if row["model"] == model} for model in models}
    floor = by_model[untrained] if untrained is not None else {}
    return [
        _compare(by_model[model], by_model[baseline], {} if model == untrained else floor)
        for model in models
        if model != baseline
    ]


def margin_of(text: str) -> float:
    """The points of ``within POINTS``.

    Raises:
        ConfigError: ``text`` is not of that form.
    """
    match = re.fullmatch(r"within (\d+(?:\.\d+)?)", text.strip())
    if match is None:
        raise ConfigError(f"cannot require {text!r}", 'the form is "within POINTS", e.g. "within 1.0"')
    return float(match[1])


def require(text: str, comparisons: Sequence[Comparison]) -> None:
    """Insist on a verdict such as ``within 1.0``, over all benchmarks.

    Raises:
        ConfigError: ``text`` is not of that form.
        VerdictError: the answer is not yes for every model.
    """
    margin = margin_of(text)
    for comparison in comparisons:
        if comparison.overall is None or comparison.overall.verdict(margin) != YES:
            raise VerdictError(comparison.sentence(margin))


def _compare(model: dict[str, Row], baseline: dict[str, Row], floor: dict[str, Row]) -> Comparison:
    if model.keys() != baseline.keys():
        raise ConfigError("the models were not evaluated on the same tasks")
    rows = [(row, baseline[column], floor.get(column)) for column, row in model.items()]
    for row, reference, _ in rows:
        _require_same_questions(row, reference)
    tasks = tuple(_points(*r) for r in rows if is_accuracy(r[0]))
    overall = None
    if tasks:
        overall = Difference("Avg", *_mean([(t.points, t.stderr) for t in tasks]), _recovered(tasks))
    losses = [r for r in rows if r[0]["column"] == HELD_OUT]
    name, reference = (next(iter(m.values()))["model"] for m in (model, baseline))
    return Comparison(name, reference, tasks, overall, _loss(*losses[0]) if losses else None)


def _recovered(tasks: Sequence[Difference]) -> tuple[float, float] | None:
    """The mean recovery of the tasks that have one."""
    known = [task.recovery for task in tasks if task.recovery is not None]
    return _mean(known) if known else None


def _mean(estimates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of independent estimates and its standard error."""
    values, errors = zip(*estimates, strict=True)
    return sum(values) / len(values), math.hypot(*errors) / len(errors)


def _points(row: Row, baseline: Row, floor: Row | None) -> Difference:
    difference, stderr = paired_difference(row["items"], baseline["items"])
    # Models that agree on every question of a small set are not known to be equal: one answer is the resolution.
    resolution = 1 / row["n"]
    stderr = max(stderr, resolution)
    chance = 0.0 if row["chance"] is None else row["chance"] / 100
    if floor is not None and floor["value"] > chance:
        level, (lost, noise) = floor["items"], paired_difference(baseline["items"], floor["items"])
    else:
        level, lost, noise = chance, baseline["value"] - chance, baseline["stderr"]
    recovery = None
    if lost > 2 * noise:
        share, error = share_recovered(row["items"], baseline["items"], level)
        recovery = share, max(error, resolution / lost)
    return Difference(row["column"], 100 * difference, 100 * stderr, recovery)


def _loss(row: Row, baseline: Row, floor: Row | None) -> Difference:
    difference, stderr = paired_difference(row["items"], baseline["items"])
    recovery = None
    if floor is not None:
        lost, noise = paired_difference(floor["items"], baseline["items"])
        if lost > 2 * noise:
            recovery = share_recovered(row["items"], baseline["items"], floor["items"])
    return Difference(HELD_OUT, difference, stderr, recovery)


def _require_same_questions(row: Row, baseline: Row) -> None:
    for key in ("settings_sha256", "data_sha256", "engine"):
        if row[key] != baseline[key]:
            raise ConfigError(
                f"{row['model']} and {baseline['model']} differ in {key.removesuffix('_sha256')} on {row['column']}",
                "compare models on the same data, settings, dtype and batch size",
            )
