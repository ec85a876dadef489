"""The arithmetic of ``fcsd bench serve``: what a client's times become, and what is said of them. Pure functions.

A *figure* is a pair of a kind and a size: ``("prefill", 2048)`` is the mean milliseconds to the first token of prompts
of 2048 tokens that came at once, ``("decode", 16)`` those of one step of 16 answers, and ``("peak", 0)`` the
milliseconds per request at full load. All of them are times, so less is better, and a ratio above 1 means that the
converted model is faster.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Figure = tuple[str, int]
Rounds = dict[Figure, list[float]]  # milliseconds in each round
PEAK: Figure = ("peak", 0)
_EVEN = 0.02  # a ratio this near to 1 is no difference


class Answer(NamedTuple):
    """How one request was answered. ``first`` and ``last`` are seconds from ``sent``, and ``sent`` from the start.

    Attributes:
        sent: when the request was sent.
        first: when its first token came.
        last: when its last token came.
        tokens: how many tokens came.
        moments: at how many moments they came; fewer than tokens if the server or the client was too busy to pass each
            one on.
    """

    sent: float
    first: float
    last: float
    tokens: int
    moments: int


def in_bursts(answers: Sequence[Answer]) -> bool:
    """Whether most tokens came together with others, so that the times of steps say little."""
    return sum(answer.moments for answer in answers) < sum(answer.tokens for answer in answers) / 2


def first_token_ms(answers: Sequence[Answer]) -> float:
    """The mean milliseconds to the first token."""
    return 1e3 * statistics.fmean(answer.first for answer in answers)


def step_ms(answers: Sequence[Answer]) -> float:
    """Milliseconds of one step of a batch: from when all have their first token to when all have their last.

    If the prompts were read in several steps, some answers are further than others then, and the last steps are
    smaller.
    """
    begin = max(answer.sent + answer.first for answer in answers)
    end = max(answer.sent + answer.last for answer in answers)
    return 1e3 * (end - begin) / (max(answer.tokens for answer in answers) - 1)


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
    """Median and 99th percentile of the milliseconds to the first token, and of those per token after it."""
    first = [1e3 * answer.first for answer in answers]
    step = [1e3 * (answer.last - answer.first) / (answer.tokens - 1) for answer in answers if answer.tokens > 1]
    times = {"first": first, "token": step}
    return {f"{name}_p{p}": percentile(values, p) for name, values in times.items() for p in (50, 99) if values}


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


def verdict(name: str, found: Mapping[Figure, float]) -> str:
    """One sentence: ``ladder is 1.31x at batch 16, 1.02x at batch 1; prefill 1.44x at 2048 tokens``. Best first.

    Args:
        name: the variant.
        found: see ``ratios``.
    """
    parts = []
    for kind, size in (("decode", "at batch {}"), ("prefill", "at {} tokens"), ("peak", "at full load")):
        own = sorted(((ratio, n) for (what, n), ratio in found.items() if what == kind), reverse=True)
        told = ", ".join(f"{ratio:.2f}x {size.format(n)}" for ratio, n in own)
        if told:
            parts.append({"decode": "", "prefill": "prefill ", "peak": "throughput "}[kind] + told)
    if not parts:
        return f"{name} was not measured beside the original"
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


def to_json(rounds: Rounds) -> dict[str, list[float]]:
    """The times with keys that JSON has: ``prefill 2048``."""
    return {f"{kind} {size}": times for (kind, size), times in rounds.items()}


def load_ratios(own: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast as the original a variant is under a load, for what both have; see ``under_load``."""
    return {name: original[name] / own[name] for name in own if name in original and own[name]}
