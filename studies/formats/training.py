"""The table of models that were healed through quantised communication of several formats.

Each run had one format for all four directions, or for dispatch and combine only (`forward`). Runs of one seed saw the
same text in the same order, so a format is compared with bf16 seed by seed. A format is called free if its mean KL is
above that of bf16 by no more than the spread of bf16 over the seeds, and its mean score is not further below.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import mean, stdev
from typing import Any

from fcsd import markdown
from fcsd.kernels.bit_split import Format

BF16 = "bf16"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A row for each format and its directions: bits per value, KL and score beside those of bf16, and if it is free.

    Differences are means over the seeds that both have, with the standard error of the mean where there are several.
    """
    body = []
    for name, way in dict.fromkeys((run["format"], run["directions"]) for run in runs):
        own = [run for run in runs if (run["format"], run["directions"]) == (name, way)]
        body.append([f"`{name}`", "-" if name == BF16 else way, f"{_bits(name):g}", str(len(own))])
        free = []
        for measure, worse, digits in ((_kl, 1, 5), (_score, -1, 2)):
            values, plain = _by_seed(own, measure), _by_seed((run for run in runs if run["format"] == BF16), measure)
            changes = [values[seed] - plain[seed] for seed in sorted(values.keys() & plain.keys())]
            body[-1].append(f"{mean(values.values()):.{digits}f}" if values else "-")
            if name == BF16:
                body[-1].append(f"spread {_spread(plain):.{digits}f}" if plain else "-")
            else:
                body[-1].append(_with_error(changes, digits) if changes else "-")
                free += [worse * mean(changes) <= _spread(plain)] if changes else []
        body[-1].append("-" if not free else "yes" if all(free) else "no")
    head = ["Format", "Directions", "Bits as sent", "Seeds", "Held-out KL", "minus bf16"]
    return markdown.table([*head, "Average score", "minus bf16", "Free"], body, left=2)


def _by_seed(runs: Iterable[dict[str, Any]], measure: Callable[[dict[str, Any]], float | None]) -> dict[int, float]:
    """Seed -> what was measured, without the runs in which it was not."""
    return {run["seed"]: value for run in runs if (value := measure(run)) is not None}


def _bits(name: str) -> float:
    return 16 if name == BF16 else Format.parse(name).bits_per_value


def _kl(run: dict[str, Any]) -> float:
    return run["held_out_kl"]


def _score(run: dict[str, Any]) -> float | None:
    """The mean of the tasks, in percent."""
    return 100 * mean(score["value"] for score in run["scores"].values()) if run["scores"] else None


def _spread(values: dict[int, float]) -> float:
    return max(values.values()) - min(values.values())


def _with_error(changes: Sequence[float], digits: int) -> str:
    error = f" ± {stdev(changes) / len(changes) ** 0.5:.{digits}f}" if len(changes) > 1 else ""
    return f"{mean(changes):+.{digits}f}{error}"
