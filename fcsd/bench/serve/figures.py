"""The arithmetic of ``fcsd bench serve``: what a client's times become, and what is said of them. Pure functions.

A *figure* is a pair of a kind and a size: ``("prefill", 2048)`` is the mean milliseconds to the first token of prompts
of 2048 tokens that came at once, ``("decode", 16)`` those of one step of 16 answers, and ``("peak", 0)`` the
milliseconds per request at full load. All of them are times, so less is better, and a ratio above 1 means that the
converted model is faster.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Figure = tuple[str, int]
Rounds = dict[Figure, list[float]]  # milliseconds in each round
T = TypeVar("T")
PEAK: Figure = ("peak", 0)
LOAD = {  # what is told of a load, see ``under_load``
    "first_p50": "first token p50", "first_p99": "first token p99", "token_p50": "step p50", "token_p99": "step p99",
}  # fmt: skip
FOR_P99 = 100  # values that a 99th percentile needs
_EVEN = 0.02  # a ratio this near to 1 is no difference


class Answer(NamedTuple):
    """How one request was answered. ``first`` and ``last`` are seconds from ``sent``, and ``sent`` from the start.

    Attributes:
        sent: when the request was sent.
        first: when its first token came.
        last: when its last token came.
        tokens: how many tokens came.
        early: how many of them came together with the first; more than one if the server or the client was too busy to
            pass each one on.
    """

    sent: float
    first: float
    last: float
    tokens: int
    early: int

    @property
    def steps(self) -> int:
        """The steps between the moments of the first and of the last token; 0 if they are too few to be timed.

        A token that came together with the first one says nothing of the time of a step. If half of the tokens did,
        the time that is left is that of a burst.
        """
        later = self.tokens - self.early
        return later if 2 * later >= self.tokens else 0


def first_token_ms(answers: Sequence[Answer]) -> float:
    """The mean milliseconds to the first token."""
    return 1e3 * statistics.fmean(answer.first for answer in answers)


def step_ms(answers: Sequence[Answer]) -> float | None:
    """Milliseconds of one step of a batch: from when all have their first token to when all have their last.

    If the prompts were read in several steps, some answers are further than others then, and the last steps are
    smaller. None if the answer that began last came in a burst, which has no steps.
    """
    latest = max(answers, key=lambda answer: answer.sent + answer.first)
    end = max(answer.sent + answer.last for answer in answers)
    return 1e3 * (end - latest.sent - latest.first) / latest.steps if latest.steps else None


def request_ms(answers: Sequence[Answer]) -> float:
    """Milliseconds per request of requests that came at once: the reciprocal of the peak rate."""
    return 1e3 * max(answer.sent + answer.last for answer in answers) / len(answers)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, between its neighbours by its place.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there are no values")
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def under_load(answers: Sequence[Answer]) -> dict[str, float]:
    """Median and 99th percentile of the milliseconds to the first token, and of those per token after it.

    Answers that came in a burst have no time per token, and if they are most, no answer has one here. The 99th
    percentile of fewer than 100 values is their maximum or nearly so, and is left out.
    """
    first = [1e3 * answer.first for answer in answers]
    step = [1e3 * (answer.last - answer.first) / answer.steps for answer in answers if answer.steps]
    times = {"first": first, "token": step if 2 * len(step) >= len(answers) else []}
    return {
        f"{name}_p{p}": percentile(values, p)
        for name, values in times.items()
        for p in (50, 99)
        if values and (p < 99 or len(values) >= FOR_P99)
    }


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When ``count`` requests are sent, in seconds: random arrivals at ``rate`` a second, the same in every call."""
    import random

    source, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += source.expovariate(rate)
    return found


def medians(rounds: Rounds) -> dict[Figure, float]:
    """The median of each figure over the rounds."""
    return {figure: statistics.median(times) for figure, times in rounds.items() if times}


def best(originals: Mapping[str, Rounds]) -> dict[Figure, tuple[float, str]]:
    """For each figure, the shortest time of all originals, and the name of the original that has it."""
    found: dict[Figure, tuple[float, str]] = {}
    for name, rounds in originals.items():
        for figure, time in medians(rounds).items():
            found[figure] = min(found.get(figure, (math.inf, "")), (time, name))
    return found


def ratios(rounds: Rounds, originals: Mapping[str, Rounds]) -> dict[Figure, float]:
    """How many times as fast as the best original a variant is, for each figure that both have."""
    against = best(originals)
    return {figure: against[figure][0] / time for figure, time in medians(rounds).items() if figure in against}


def says_nothing(bounds: Mapping[str, Rounds], originals: Mapping[str, Rounds]) -> dict[Figure, float]:
    """The figures in which even the bound is slower than the best original, with its speed over it.

    A bound sends nothing and does the rest of the work. Where it is slower, other work of the host took longer than
    all sums, so no ratio of this figure says anything about a wiring.
    """
    fastest = {figure: [time] for figure, (time, _) in best(bounds).items()}
    return {figure: ratio for figure, ratio in ratios(fastest, originals).items() if ratio < 1 - _EVEN}


def verdict(name: str, found: Mapping[Figure, float]) -> str:
    """One sentence: ``ladder is 1.31x at batch 16, 1.02x at batch 1; prefill 1.44x at 2048 tokens``. Best first.

    Args:
        found: see ``ratios``; without those that say nothing.
    """
    parts = []
    for kind, size in (("decode", "at batch {}"), ("prefill", "at {} tokens"), ("peak", "at full load")):
        own = sorted(((ratio, n) for (what, n), ratio in found.items() if what == kind), reverse=True)
        told = ", ".join(f"{ratio:.2f}x {size.format(n)}" for ratio, n in own)
        if told:
            parts.append({"decode": "", "prefill": "prefill ", "peak": "throughput "}[kind] + told)
    if not parts:
        return f"{name} has no figure that can be compared with the original"
    return f"{name} is {'; '.join(parts)}: {judged(found)}"


def judged(found: Mapping[Figure, float]) -> str:
    """Whether converting would pay by these ratios, in words."""
    faster = [ratio > 1 + _EVEN for ratio in found.values()]
    slower = [ratio < 1 - _EVEN for ratio in found.values()]
    if all(faster):
        return "faster everywhere"
    if not any(faster):
        return "converting does not pay here" if any(slower) else "no difference, converting does not pay here"
    return "faster in part, and slower elsewhere" if any(slower) else "faster in part, and nowhere slower"


def break_even_days(hours: float, ratio: float, gpus: int) -> float:
    """Days of serving at full load after which the GPU-hours of healing are won back; infinite if nothing is won.

    Serving what the original serves takes ``1 / ratio`` of its GPU-hours, so each GPU saves ``1 - 1 / ratio`` of its
    time.

    Args:
        hours: GPU-hours of healing.
        ratio: the speed of the converted model over that of the original.
        gpus: GPUs that serve.
    """
    return hours / (24 * gpus * (1 - 1 / ratio)) if ratio > 1 else math.inf


def break_even(hours: float, ratio: float, gpus: int) -> str:
    """The same as a sentence."""
    days = break_even_days(hours, ratio, gpus)
    if math.isinf(days):
        return f"{hours:g} GPU-hours of healing are never won back at {ratio:.2f}x"
    return (
        f"{hours:g} GPU-hours of healing are won back after {days:.0f} days of serving by {gpus} GPUs at {ratio:.2f}x"
    )


def overall(found: Mapping[Figure, float]) -> float | None:
    """The ratio that the break-even takes: that of full load, or the geometric mean of all if it was not measured."""
    if PEAK in found:
        return found[PEAK]
    return statistics.geometric_mean(found.values()) if found else None


def to_json(values: Mapping[Figure, T]) -> dict[str, T]:
    """Times or ratios with keys that JSON has: ``prefill 2048``."""
    return {f"{kind} {size}": value for (kind, size), value in values.items()}


def load_ratios(own: Mapping[str, Any], originals: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times as fast as the fastest original a variant is under a load, for each of ``LOAD``."""
    best = {
        name: min(row[name] for row in originals if name in row) for name in LOAD if any(name in r for r in originals)
    }
    return {name: best[name] / own[name] for name in LOAD if name in own and name in best}


def load_verdict(name: str, load: Mapping[str, Any], found: Mapping[str, float]) -> str | None:
    """One sentence of a variant under a load; None if nothing was measured of it and of an original.

    Args:
        load: its row: ``rate``, requests a second, and ``requests``, how many were sent.
        found: see ``load_ratios``.
    """
    parts = []
    for kind, title in (("first", "first token"), ("token", "step")):
        told = [
            f"{found[f'{kind}_p{p}']:.2f}x {what}"
            for p, what in ((50, "median"), (99, "p99"))
            if f"{kind}_p{p}" in found
        ]
        if told:
            parts.append(f"{title} {', '.join(told)}")
    told = f"{load['requests']} requests, {load['rate']:.3g} a second"
    few = f"; too few requests for a p99, which needs {FOR_P99}" if load["requests"] < FOR_P99 else ""
    return f"{name} ({told}): {'; '.join(parts)}{few}" if parts else None
