"""Fits what healing leaves to the stored runs, for ``studies/real/healing_law.json``.

Two power laws, each a straight line in logarithms, fitted by least squares:

    KL = c * n^a * W^d * T^-b            n: the share of the layers that is converted, T: tokens in millions
    points lost = p * KL^q               W: the sum of what all layers cost alone under the wiring, in nats per token

The first takes every run by KL and AdamW that trained the converted layers alone, read text of the model's own and was
measured to its end; KL is that on own text. The second takes every model that has scores, the untrained ones included,
however it was trained. ``predictions`` reads the file, whose matrix and residual give the uncertainty of
a new value. All runs are of one model of 135 million parameters, and some have other learning rates and batches.

``checks`` says how well such a law predicts the cells of the frontier when it is fitted to other runs.
"""

import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
from scipy.stats import t as student_t
from studies.blocks import between_marks
from studies.real import frontier
from studies.real.page import CELLS, LAYERS, MORE, RAW, mean_difference, read_cells
from studies.real.predictions import losses

from fcsd.markdown import table
from fcsd.models.selection import select_layers

OUT, PAGE = Path("studies/real/healing_law.json"), Path("studies/real/PREDICTIONS.md")
HEALED = "SmolLM2-135M-Instruct"
CONVERTED = ["converted"]  # ``optim.train`` of the runs to which the divergence is fitted
OTHER_RECIPE = ("objective.", "optim.kind")  # runs that set one of these are left out


def stored(repo: Path = Path()) -> list[dict[str, Any]]:
    """The files of runs, those of the frontier's cells last."""
    return [*(json.loads((repo / file).read_text()) for file in (*RAW, *MORE)), read_cells(repo)]


def runs_of(files: Iterable[dict[str, Any]], train: Any = CONVERTED, repo: Path = Path()) -> list[dict[str, Any]]:
    """The runs of a recipe with known costs: ``train`` is their ``optim.train``, None for all weights.

    Each has its row of the divergence's line as ``at``, and in ``asked`` a divergence with the points minus the
    original's: of the healed model and of the untrained one, as far as they have scores.
    """
    found, costs = [], frontier.costs(repo)
    for file in files:
        models = {one["model"] for one in file.get("differences", ())}
        for run in file["runs"]:
            changed = run.get("set", {})
            other = any(key.startswith(OTHER_RECIPE) for key in changed) or changed.get("optim.train") != train
            if "kl" not in run or "own" not in run["text"].split("+") or other or run["wiring"] not in costs:
                continue
            alone = costs[run["wiring"]]
            share = len(select_layers(run["layers"], len(alone))) / len(alone)
            names = {"kl": run["name"], "untrained_kl": f"{run['name']}-untrained"}
            asked = [
                (run[key]["own"]["kl"], mean_difference(file, name)[0]) for key, name in names.items() if name in models
            ]
            at = [1.0, math.log(share), math.log(sum(alone)), -math.log(run["tokens"] / 1e6)]
            found.append({**run, "at": at, "asked": asked})
    return found


def law(repo: Path = Path()) -> dict[str, Any]:
    """The file's content: both fits, the profiles of costs that were measured, and where all of it comes from."""
    files = stored(repo)
    costs = {name: json.loads((repo / file).read_text()) for name, file in LAYERS.items()}
    runs = runs_of(files, repo=repo)
    tokens = [run["tokens"] for run in runs]
    return {
        "from": [str(file) for file in (*RAW, *MORE, *CELLS, *LAYERS.values())],
        "model": HEALED,
        "wirings": sorted({run["wiring"] for run in runs}),
        **fits(runs, [*runs, *runs_of(files, None, repo)]),
        "tokens": [min(tokens), max(tokens)],
        "costs": {
            name: {wiring: [round(cost, 5) for cost in found[wiring]["alone"]] for wiring in ("ladder", "farskip")}
            for name, found in costs.items()
        },
    }


def fits(runs: list[dict[str, Any]], scored: list[dict[str, Any]]) -> dict[str, Any]:
    """Both fits of a law: the divergence of ``runs``, and the points of those that have ``scored``.

    ``runs_of`` made both lists. ``shares`` and ``wholes`` are the least and the greatest n and W of ``runs``.
    """
    asked = [pair for run in scored for pair in run["asked"]]
    shares, wholes = ([math.exp(run["at"][n]) for run in runs] for n in (1, 2))
    return {
        "kl": {
            **_fit([run["at"] for run in runs], [math.log(run["kl"]["own"]["kl"]) for run in runs]),
            "of": ["1", "log share of the layers", "log cost of all layers", "-log millions of tokens"],
        },
        "points": {
            **_fit([[1.0, math.log(kl)] for kl, _ in asked], [math.log(-points) for _, points in asked]),
            "of": ["1", "log KL"],
        },
        "shares": [min(shares), max(shares)],
        "wholes": [min(wholes), max(wholes)],
    }


def checks(files: list[dict[str, Any]], repo: Path = Path()) -> list[dict[str, Any]]:
    """Which cells of the frontier lie in the intervals of 90 % of laws that were not fitted to them.

    Each line has what the law was fitted ``to``, to how many ``runs``, and the ``cells`` by wiring: a pair for each
    cell, the divergence on own text and the points, each -1, 0 or 1 for below, within and above; None if not asked. The
    laws are fitted to the older runs of all weights, to those of the converted layers alone, and to these and the cells
    without each wiring.
    """
    *older, file = files
    cells, alone, full = runs_of([file], repo=repo), runs_of(older, repo=repo), runs_of(older, None, repo)
    lines = [
        ("older runs of all weights", full, full, cells),
        ("older runs of the converted layers alone", alone, alone + full, cells),
    ]
    for wiring in dict.fromkeys(run["wiring"] for run in cells):
        others = [run for run in alone + cells if run["wiring"] != wiring]
        rest = [run for run in others + full if run["wiring"] != wiring]
        lines.append((f"all but {wiring}", others, rest, [run for run in cells if run["wiring"] == wiring]))
    found = []
    for to, runs, scored, asked in lines:
        fitted = fits(runs, scored)
        by: dict[str, list[tuple[int, int | None]]] = {}
        for run in asked:
            share, whole = (math.exp(value) for value in run["at"][1:3])
            told = losses(share, (whole, whole), run["tokens"] / 1e6, fitted)
            lost = next((-points for kl, points in run["asked"] if kl == run["kl"]["own"]["kl"]), None)
            pair = _beside(run["kl"]["own"]["kl"], told["kl"]), None if lost is None else _beside(lost, told["points"])
            by.setdefault(run["wiring"], []).append(pair)
        found.append({"to": to, "runs": len(runs), "cells": by})
    return found


def _beside(value: float, ends: tuple[float, float]) -> int:
    """Whether a value is below an interval (-1), in it (0) or above it (1)."""
    return (value > ends[1]) - (value < ends[0])


def _fit(rows: list[list[float]], known: list[float]) -> dict[str, Any]:
    """Least squares: coefficients, their covariance without the residual's variance, the residual, and Student's t."""
    design, values = numpy.array(rows), numpy.array(known)
    inverse = numpy.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ values
    spare = len(known) - design.shape[1]
    residual = math.sqrt(float(((design @ coefficients - values) ** 2).sum()) / spare)
    return {
        "coefficients": [round(float(c), 5) for c in coefficients],
        "inverse": [[round(float(v), 6) for v in row] for row in inverse],
        "residual": round(residual, 5),
        "runs": len(known),
        "t": round(float(student_t.ppf(0.95, spare)), 4),  # the ends of an interval of 90 %
    }


def sentence(found: dict[str, Any]) -> str:
    """The law in words, for ``PREDICTIONS.md``."""
    (c, a, d, b), (p, q) = found["kl"]["coefficients"], found["points"]["coefficients"]
    away, points = (math.exp(found[name]["residual"]) for name in ("kl", "points"))
    first, last = (round(tokens / 1e6) for tokens in found["tokens"])
    said = (
        f"The loss is a law that `studies/real/law.py` fitted to {found['kl']['runs']} runs of {found['model']} that "
        f"trained the converted layers alone ({', '.join(found['wirings'])}): "
        f"the divergence on own text is {math.exp(c):.3f} * n^{a:.2f} * W^{d:.2f} * T^{-b:.2f} nats per token, where n "
        "is the share of the layers that is converted, W the sum of what all layers cost alone under the wiring, and T "
        f"the tokens in millions ({first} to {last}). A single run is "
        f"a factor of {away:.2f} away from it (one standard deviation). The points lost on the tasks on which the "
        f"model is above chance are {math.exp(p):.1f} * KL^{q:.2f}, by {found['points']['runs']} models, with a "
        f"factor of {points:.2f}."
    )
    return textwrap.fill(said, 120) + "\n"


def table_of_checks(found: list[dict[str, Any]]) -> str:
    """Markdown with ``checks``: how many cells of each wiring lie in the intervals, by divergence and by points."""
    wirings = list(found[0]["cells"])
    body = []
    for line in found:
        cells = []
        for pairs in (line["cells"].get(wiring) for wiring in wirings):
            if pairs is None:
                cells.append("")
                continue
            kl, points = ([side for side in sides if side is not None] for sides in zip(*pairs, strict=True))
            cells.append(f"{kl.count(0)} of {len(kl)}; {points.count(0)} of {len(points)}")
        body.append([line["to"], str(line["runs"]), *cells])
    return table(["fitted to", "runs", *wirings], body, left=1) + "\n"


def filled(page: str, found: dict[str, Any], checked: list[dict[str, Any]]) -> str:
    """The page with the law and its checks between their marks."""
    return between_marks(page, {"law": sentence(found), "checks": table_of_checks(checked)})
