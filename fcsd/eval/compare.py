"""Compares models with their baseline, question by question: differences, recoveries and one verdict.

Two models that answered the same questions are compared by their differences per question. These vary several times
less than either score does. The verdict follows from the bounds of ``bounds.py``.

A benchmark on which the baseline is not above chance measures nothing. It is named, and left out of the mean. A
benchmark that stands beside the mean, such as LAMBADA, has a verdict of its own and is left out of it, too.

A task whose questions give partial credit (IFEval aggregated) has a verdict too; ``bounds.py`` says how. Losses and
perplexities have none: they are not counted in points, and are compared in nats.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fcsd.errors import ConfigError, VerdictError
from fcsd.eval.bounds import Counts, count, mean_bounds, task_bounds
from fcsd.eval.perplexity import HELD_OUT
from fcsd.eval.results import PERPLEXITIES, UNITS, Result, in_mean, is_accuracy
from fcsd.eval.statistics import Item, paired_difference, share_recovered

YES, NO, UNDECIDED = "yes", "no", "not enough samples"

Estimate = tuple[float, float]  # a value and its standard error


@dataclass(frozen=True)
class Difference:
    """A model's score minus its baseline's, in points.

    Attributes:
        column: the benchmark, or ``Avg``.
        stderr: the paired standard error; it describes the difference, and the verdict does not use it.
        low, high: the difference is at least ``low`` with 95 % confidence, and at most ``high`` with 95 % confidence.
        recovery: how far the score is from the floor (0) to the baseline (1), with its standard error. The floor
            is chance or the untrained conversion's score, whichever is higher. None without an untrained conversion,
            because nobody knows then what was lost, for that conversion itself, and where the baseline is within two
            standard errors of the floor. For ``Avg``, it is the mean over the benchmarks that have a recovery.
        at_chance: whether the baseline is not above chance, so that the benchmark is not in ``Avg``.
        beside: whether the benchmark stands beside ``Avg``, whatever the baseline's score is.
    """

    column: str
    points: float
    stderr: float
    low: float
    high: float
    recovery: Estimate | None = None
    at_chance: bool = False
    beside: bool = False

    def verdict(self, margin: float) -> str:
        """Whether the model is at most ``margin`` points below its baseline: yes, no or not enough samples.

        The answers yes and no each have 95 % confidence.
        """
        if self.low >= -margin:
            return YES
        return NO if self.high < -margin else UNDECIDED


@dataclass(frozen=True)
class LossDifference:
    """A model's loss minus its baseline's.

    Attributes:
        column: the text.
        nats: the difference, in nats per ``unit`` (token, word, byte or answer); positive where the model is worse.
        stderr: its paired standard error, from text to text.
        recovery: the share of the untrained conversion's increase in loss that training removed, with its standard
            error.
    """

    column: str
    nats: float
    unit: str
    stderr: float
    recovery: Estimate | None = None


@dataclass(frozen=True)
class Answers:
    """How long the generated answers of a model and of its baseline are. Items without an end reached the limit.

    Attributes:
        tokens, baseline_tokens: tokens of an answer in the mean.
        unended, baseline_unended: the share of answers that do not end.
    """

    column: str
    tokens: float
    baseline_tokens: float
    unended: float
    baseline_unended: float


@dataclass(frozen=True)
class Comparison:
    """A model against its baseline.

    Attributes:
        tasks: one difference per benchmark that is counted in points.
        overall: the mean with equal weights, as Table 1's Avg, over those of them on which the baseline is above
            chance; None if there are none.
        loss: the difference in held-out loss; None without a held-out text.
        perplexities: the benchmarks that are perplexities or losses, as differences in loss.
        answers: the benchmarks whose answers are generated, where the lengths of both models' are known.
    """

    model: str
    baseline: str
    tasks: tuple[Difference, ...]
    overall: Difference | None
    loss: LossDifference | None
    perplexities: tuple[LossDifference, ...] = ()
    answers: tuple[Answers, ...] = ()

    @property
    def losses(self) -> tuple[LossDifference, ...]:
        """All differences in loss, that of the held-out text last."""
        return self.perplexities if self.loss is None else (*self.perplexities, self.loss)

    def further_below(self, margin: float) -> list[Difference]:
        """The tasks shown to be more than ``margin`` points below the baseline, the lowest first."""
        return sorted((task for task in self.tasks if task.verdict(margin) == NO), key=lambda task: task.points)

    def sentence(self, margin: float) -> str:
        """The verdict in words. It names every task that is shown to be further below."""
        overall = self.overall
        if overall is not None:
            verdict = overall.verdict(margin)
            points = f"{overall.points:+.1f} ± {overall.stderr:.1f}"
            bounds = {YES: [f"at least {overall.low:+.2f}"], NO: [f"at most {overall.high:+.2f}"]}
            bound = " and ".join(bounds.get(verdict, [*bounds[YES], *bounds[NO]]))
            text = f"{self.model} within {margin:g} points of {self.baseline}: {verdict} ({points})"
            text += f", {bound} with 95 % confidence"
        elif any(task.at_chance for task in self.tasks):
            text = f"{self.model}: {self.baseline} is not above chance on any benchmark, so none can tell"
        else:
            text = f"{self.model}: no benchmark that counts in the mean"
        if below := self.further_below(margin):
            named = ", ".join(f"{task.column} ({task.points:+.1f})" for task in below)
            text += f"; further below on {named}"
        if unknown := [task.column for task in self.tasks if task.at_chance]:
            text += f"; not counted, because {self.baseline} is not above chance: {', '.join(unknown)}"
        if beside := [f"{task.column} ({task.points:+.1f} ± {task.stderr:.1f})" for task in self.tasks if task.beside]:
            text += f"; beside the mean: {', '.join(beside)}"
        for one in self.answers:
            text += f"; answers to {one.column}: {one.tokens:.0f} tokens instead of {one.baseline_tokens:.0f}, "
            text += f"{100 * one.unended:.1f} % without an end instead of {100 * one.baseline_unended:.1f} %"
        return text

    def to_json(self, margin: float) -> dict[str, Any]:
        """The comparison as JSON-like data, including the verdicts for ``margin``."""

        def plain(difference: Difference | None) -> dict[str, Any] | None:
            return None if difference is None else {**vars(difference), "verdict": difference.verdict(margin)}

        return {
            "model": self.model,
            "baseline": self.baseline,
            "margin": margin,
            "tasks": [plain(task) for task in self.tasks],
            "overall": plain(self.overall),
            "loss": None if self.loss is None else vars(self.loss),
            "perplexities": [vars(loss) for loss in self.perplexities],
            "answers": [vars(one) for one in self.answers],
            "sentence": self.sentence(margin),
        }


@dataclass(frozen=True)
class Requirement:
    """The condition that ``--require`` gives, in points.

    Attributes:
        overall: it must be shown that the mean over the tasks is at most this many points below the baseline.
        each: no task may be shown to be more than this many points below; None for no condition on single tasks.
    """

    overall: float
    each: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Read ``within 1.0`` or ``within 1.0, each within 3.0``.

        Raises:
            ConfigError: ``text`` has another form.
        """
        number = r"(\d+(?:\.\d+)?)"
        match = re.fullmatch(rf"within {number}(?:\s*,\s*each within {number})?", text.strip())
        if match is None:
            form = '"within POINTS" or "within POINTS, each within POINTS", e.g. "within 1.0, each within 3.0"'
            raise ConfigError(f"--require {text!r} is not understood", f"Write it as {form}")
        return cls(float(match[1]), None if match[2] is None else float(match[2]))

    def check(self, comparisons: Sequence[Comparison]) -> None:
        """Check that comparisons satisfy the requirement.

        Raises:
            VerdictError: a model's overall answer is not yes, or one of its tasks is shown to be too far below.
        """
        for comparison in comparisons:
            if comparison.overall is None or comparison.overall.verdict(self.overall) != YES:
                raise VerdictError(comparison.sentence(self.overall))
            if self.each is not None and (below := comparison.further_below(self.each)):
                named = ", ".join(f"{task.column} ({task.points:+.1f}, at most {task.high:+.1f})" for task in below)
                raise VerdictError(
                    f"{comparison.model} is more than {self.each:g} points below {comparison.baseline} on {named}"
                )


def compare_models(results: Sequence[Result], *, untrained: str | None = None) -> list[Comparison]:
    """Compare every model with the one whose results are marked as baseline.

    Args:
        results: the return value of ``evaluate_models``.
        untrained: the name of the untrained conversion among the models, for the recoveries.

    Raises:
        ConfigError: no baseline, an unknown ``untrained``, or models that did not answer the same questions
            under the same settings.
    """
    models = list(dict.fromkeys(result["model"] for result in results))
    baseline = next((result["model"] for result in results if result["baseline"]), None)
    if baseline is None:
        raise ConfigError("there is no baseline to compare with", "Name one by --baseline.")
    if untrained is not None and untrained not in models:
        raise ConfigError(f"no model {untrained!r} was evaluated", f"These were: {', '.join(models)}")
    by_model = {model: {result["column"]: result for result in results if result["model"] == model} for model in models}
    floor = by_model[untrained] if untrained is not None else {}
    return [
        _compare(by_model[model], by_model[baseline], {} if model == untrained else floor)
        for model in models
        if model != baseline
    ]


def not_above_chance(result: Result) -> bool:
    """Whether a score is at most two standard errors above the score of guessing, where that is known.

    The error is the score's own, or that of guessing if it is larger: a few answers that are all right have no spread.
    One answer shows nothing.
    """
    if result["chance"] is None:
        return False
    chance = result["chance"] / 100
    error = max(result["stderr"], math.sqrt(chance * (1 - chance) / result["n"]))  # NaN for one answer
    return not result["value"] - chance > 2 * error


def _compare(model: dict[str, Result], baseline: dict[str, Result], floor: dict[str, Result]) -> Comparison:
    if model.keys() != baseline.keys():
        raise ConfigError("the models were not evaluated on the same tasks")
    results = [(result, baseline[column], floor.get(column)) for column, result in model.items()]
    for result, reference, _ in results:
        _require_same_questions(result, reference)
    scored = [three for three in results if is_accuracy(three[0])]
    counts = [count(result["items"], reference["items"]) for result, reference, _ in scored]
    tasks = tuple(_points(*three, counted) for three, counted in zip(scored, counts, strict=True))
    held_out = [_loss(*three) for three in results if three[0]["column"] == HELD_OUT]
    perplexities = tuple(
        _loss(*three) for three in results if not is_accuracy(three[0]) and three[0]["column"] != HELD_OUT
    )
    name, reference = (next(iter(m.values()))["model"] for m in (model, baseline))
    told = [both for both in zip(tasks, counts, strict=True) if not both[0].at_chance and not both[0].beside]
    overall = _overall(*zip(*told, strict=True)) if told else None
    answers = tuple(_answers(*three[:2]) for three in results if three[0].get("answers") and three[1].get("answers"))
    return Comparison(name, reference, tasks, overall, held_out[0] if held_out else None, perplexities, answers)


def _answers(result: Result, baseline: Result) -> Answers:
    one, other = result["answers"], baseline["answers"]
    return Answers(result["column"], one["tokens"], other["tokens"], one["unended"], other["unended"])


def _overall(tasks: Sequence[Difference], counts: Sequence[Counts]) -> Difference:
    points, stderr = _mean([(task.points, task.stderr) for task in tasks])
    low, high = mean_bounds(counts)
    known = [task.recovery for task in tasks if task.recovery is not None]
    return Difference("Avg", points, stderr, 100 * low, 100 * high, _mean(known) if known else None)


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates and its standard error."""
    values, errors = zip(*estimates, strict=True)
    return sum(values) / len(values), math.hypot(*errors) / len(errors)


def _points(result: Result, baseline: Result, floor: Result | None, counts: Counts) -> Difference:
    difference, stderr = paired_difference(result["items"], baseline["items"])
    # Models that agree on every question of a small set may still differ. The resolution of the set is one answer.
    resolution = 1 / result["n"]
    stderr = max(stderr, resolution)
    recovery = None if floor is None else _recovery(result, baseline, floor, resolution)
    low, high = task_bounds(counts)
    points, error, low, high = (100 * share for share in (difference, stderr, low, high))
    beside = not in_mean(result)
    return Difference(result["column"], points, error, low, high, recovery, not_above_chance(baseline), beside)


def _recovery(result: Result, baseline: Result, floor: Result, resolution: float) -> Estimate | None:
    """How far a score is from the floor to the baseline; see ``Difference``."""
    chance = 0.0 if result["chance"] is None else result["chance"] / 100
    if floor["value"] > chance:
        level, (lost, noise) = floor["items"], paired_difference(baseline["items"], floor["items"])
    else:
        level, lost, noise = chance, baseline["value"] - chance, baseline["stderr"]
    if not lost > 2 * noise:  # the noise of a single answer is NaN
        return None
    share, error = share_recovered(result["items"], baseline["items"], level)
    return share, max(error, resolution / lost)


def _loss(result: Result, baseline: Result, floor: Result | None) -> LossDifference:
    items, reference = nats(result), nats(baseline)
    difference, stderr = paired_difference(items, reference)
    recovery = None
    if floor is not None:
        lost, noise = paired_difference(nats(floor), reference)
        if lost > 2 * noise:
            recovery = share_recovered(items, reference, nats(floor))
    return LossDifference(result["column"], difference, UNITS[result["metric"]], stderr, recovery)


def nats(result: Result) -> list[Item]:
    """The loss of every document in nats, with its number of tokens, words or bytes."""
    if result["metric"] not in PERPLEXITIES:
        return result["items"]
    return [(-loglikelihood, units) for loglikelihood, units in result["items"]]


def _require_same_questions(result: Result, baseline: Result) -> None:
    for key in ("settings_sha256", "data_sha256"):
        if result[key] != baseline[key]:
            raise ConfigError(
                f"{result['model']} and {baseline['model']} differ in {key.removesuffix('_sha256')}"
                f" on {result['column']}",
                "compare models on the same data and settings",
            )
    require_same_engine(result["model"], result["engine"], baseline)


def require_same_engine(model: str, engine: dict[str, Any], baseline: Result) -> None:
    """Check that a model is run as the baseline was, in whose results ``baseline`` is one.

    Raises:
        ConfigError: something differs; the message names it.
    """
    then = baseline["engine"]
    if changed := sorted(key for key in {*engine, *then} if engine.get(key) != then.get(key)):
        found = ", ".join(f"{key} {engine.get(key)} and {then.get(key)}" for key in changed)
        shortest = min((one["max_length"] for one in (engine, then) if one.get("max_length")), default=None)
        hint = "compare models with the same dtype, device, batch size and longest input"
        if changed == ["max_length"] and shortest:
            hint = f"give both the shorter one: --max-length {shortest}"
        raise ConfigError(f"{model} and {baseline['model']} differ in {found}", hint)
