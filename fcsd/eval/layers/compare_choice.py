"""Compares a choice of layers with as many first, last and random layers, on a text that the search did not read."""

import random
from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path
from statistics import stdev
from typing import Any

from fcsd import markdown
from fcsd.eval.layers.rewiring import Layers, Subject, first, last, reads_in_flight
from fcsd.eval.statistics import estimate, paired_difference
from fcsd.models.selection import layers_text

Items = list[tuple[float, int]]

RANDOM_SETS = 20


def compare_choice(measure: Callable[[Layers], Items], chosen: Layers, subject: Subject) -> dict[str, Any]:
    """Measure a choice, and as many first, last and random layers.

    Returns:
        ``n``; ``chosen``, ``first``, ``last`` and the ``random`` sets, each with its layers, its loss in nats per
        token, its ``increase`` over the unconverted model, and ``difference``: its loss minus the choice's as
        ``[value, standard error]``, paired by document; ``random_mean``, the average random set, with its
        ``difference``, the ``sd`` between sets, and how many sets are ``better`` than the choice.
    """
    n, depth = len(chosen), subject.depth

    def entry(layers: Layers) -> dict[str, Any]:
        loss = estimate(measure(layers))[0]
        return {
            "layers": list(layers),
            "spec": layers_text(layers),
            "reads_in_flight": reads_in_flight(subject.wired(layers), subject.halves),
            "loss": loss,
            "increase": loss / estimate(measure(()))[0] - 1,
            "difference": paired_difference(measure(layers), measure(chosen)),
        }

    drawn = random_sets(n, depth)
    sets = [entry(layers) for layers in drawn]
    by_document = zip(*(measure(layers) for layers in drawn), strict=True)
    mean = [(sum(nll for nll, _ in document) / len(drawn), document[0][1]) for document in by_document]
    losses = [found["loss"] for found in sets]
    own = entry(chosen)
    return {
        "n": n,
        "chosen": own,
        "first": entry(first(n)),
        "last": entry(last(n, depth)),
        "random": sets,
        "random_mean": {
            "difference": paired_difference(mean, measure(chosen)),
            "increase": sum(found["increase"] for found in sets) / len(sets),
            "reads_in_flight": sum(found["reads_in_flight"] for found in sets) / len(sets),
            "sd": stdev(losses) if len(losses) > 1 else 0.0,
            "better": sum(loss < own["loss"] for loss in losses),
        },
    }


def random_sets(n: int, depth: int, seed: int = 0) -> list[Layers]:
    """``RANDOM_SETS`` distinct sets of ``n`` layers, or all there are; the same for the same seed."""
    generator, sets = random.Random(seed), dict[Layers, None]()
    while len(sets) < min(RANDOM_SETS, comb(depth, n)):
        sets[tuple(sorted(generator.sample(range(depth), n)))] = None
    return list(sets)


def table(comparison: Sequence[dict[str, Any]]) -> str:
    """Markdown with a row per set of layers; differences are in nats per token, positive where the choice is better."""
    body = []
    for found in comparison:
        size, mean = str(found["n"]), found["random_mean"]
        for name in ("chosen", "first", "last"):
            entry = found[name]
            difference = "" if name == "chosen" else _signed(entry["difference"])
            reads = str(entry["reads_in_flight"])
            body.append([size, name, entry["spec"], reads, f"{100 * entry['increase']:.1f} %", difference])
        label = f"random, mean of {len(found['random'])}"
        beaten = f"{mean['better']} of them better"
        increase = f"{100 * mean['increase']:.1f} %"
        body.append([size, label, beaten, f"{mean['reads_in_flight']:.1f}", increase, _signed(mean["difference"])])
    return markdown.table(["N", "Set", "Layers", "Reads in flight", "Loss increase", "Loss minus the choice's"], body)


def _signed(difference: Sequence[float]) -> str:
    return f"{difference[0]:+.4f} ± {difference[1]:.4f}"


def draw(comparison: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG: the loss increase over N of the choice, the first and last layers, and every random set."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers = [found["n"] for found in comparison]
    for number, found in enumerate(comparison):
        sets = [100 * entry["increase"] for entry in found["random"]]
        label = "random" if number == 0 else None
        axes.scatter([found["n"]] * len(sets), sets, s=14, color="lightgrey", edgecolors="grey", label=label)
    for name, colour in (("first", "tab:red"), ("last", "tab:blue"), ("chosen", "black")):
        increases = [100 * found[name]["increase"] for found in comparison]
        axes.plot(numbers, increases, color=colour, marker="o", markersize=4, label=name)
    axes.set_xticks(numbers)
    axes.set_xlabel("N converted layers, untrained")
    axes.set_ylabel("loss increase, %")
    axes.set_title("on text the search did not see")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
