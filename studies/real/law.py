"""Fits what healing leaves to the stored runs: ``python -m studies.real.law`` writes ``fcsd/plan/healing_law.json``.

Two power laws, each a straight line in logarithms, fitted by least squares:

    KL = c * S^a * T^-b                  S: the sum of the costs of the converted layers alone, in nats per token
    points lost = p * KL^q               T: tokens in millions

The first takes every run by KL and AdamW that read text of the model's own and was measured to its end; KL is that on
own text. The second takes every model of these runs that has scores, the untrained ones included. ``fcsd plan
--frontier`` reads the file, whose matrix and residual give the uncertainty of a new value. All runs are of one model of
135 million parameters, and some have other learning rates and batches.
"""

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy
from scipy.stats import t as student_t
from studies.real.page import LAYERS, RAW, mean_difference

from fcsd.models.selection import select_layers

OUT, PAGE = Path("fcsd/plan/healing_law.json"), Path("docs/planning.md")
HEALED = "SmolLM2-135M-Instruct"
OTHER_RECIPE = ("objective.", "optim.kind", "optim.train")  # runs that set one of these are left out


def law(repo: Path = Path()) -> dict[str, Any]:
    """The file's content: both fits, the profiles of costs that were measured, and where all of it comes from."""
    raw = [json.loads((repo / file).read_text()) for file in RAW]
    costs = {name: json.loads((repo / file).read_text()) for name, file in LAYERS.items()}
    runs = [run for file in raw for run in file["runs"] if "kl" in run and "own" in run["text"].split("+")]
    runs = [run for run in runs if not any(key.startswith(OTHER_RECIPE) for key in run.get("set", {}))]
    rows, known = [], []
    for run in runs:
        alone = costs[HEALED][run["wiring"]]["alone"]
        total = sum(alone[layer] for layer in select_layers(run["layers"], len(alone)))
        rows.append([1.0, math.log(total), -math.log(run["tokens"] / 1e6)])
        known.append(math.log(run["kl"]["own"]["kl"]))
    lost, divergence = [], []
    for scored, name in ((file, found["model"]) for file in raw for found in file.get("differences", ())):
        run = next((run for run in runs if name.removesuffix("-untrained") == run["name"]), None)
        if run is None:
            continue
        kl = run["untrained_kl" if name.endswith("-untrained") else "kl"]["own"]["kl"]
        lost.append(math.log(-mean_difference(scored, name)[0]))
        divergence.append([1.0, math.log(kl)])
    return {
        "from": [str(file) for file in (*RAW, *LAYERS.values())],
        "model": HEALED,
        "kl": {**_fit(rows, known), "of": ["1", "log sum of costs", "-log millions of tokens"]},
        "points": {**_fit(divergence, lost), "of": ["1", "log KL"]},
        "tokens": [min(run["tokens"] for run in runs), max(run["tokens"] for run in runs)],
        "sums": [min(math.exp(row[1]) for row in rows), max(math.exp(row[1]) for row in rows)],
        "costs": {
            name: {wiring: [round(cost, 5) for cost in found[wiring]["alone"]] for wiring in ("ladder", "farskip")}
            for name, found in costs.items()
        },
    }


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
    """The law in words, for ``docs/planning.md``."""
    (c, a, b), (p, q) = found["kl"]["coefficients"], found["points"]["coefficients"]
    away, points = (math.exp(found[name]["residual"]) for name in ("kl", "points"))
    first, last = (round(tokens / 1e6) for tokens in found["tokens"])
    said = (
        f"The loss is a law that `studies/real/law.py` fitted to {found['kl']['runs']} runs of {found['model']}: "
        f"the divergence on own text is {math.exp(c):.3f} * S^{a:.2f} * T^{-b:.2f} nats per token, where S is the sum "
        f"of what the converted layers cost alone and T the tokens in millions ({first} to {last}). A single run is "
        f"a factor of {away:.2f} away from it (one standard deviation). The points lost on the tasks on which the "
        f"model is above chance are {math.exp(p):.1f} * KL^{q:.2f}, by {found['points']['runs']} models, with a "
        f"factor of {points:.2f}."
    )
    return textwrap.fill(said, 120) + "\n"


def filled(page: str, found: dict[str, Any]) -> str:
    """The page with the law between its marks."""
    before, rest = page.split("<!-- law -->\n")
    return (
        before + "<!-- law -->\n" + sentence(found) + "<!-- end of law -->\n" + rest.split("<!-- end of law -->\n")[1]
    )


if __name__ == "__main__":
    fitted = law()
    OUT.write_text(json.dumps(fitted, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), fitted))
