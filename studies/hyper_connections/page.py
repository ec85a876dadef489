"""Writes the table of HYPER_CONNECTIONS.md from stored results: ``python -m studies.hyper_connections.page``."""

import json
import statistics
from pathlib import Path
from typing import Any

from studies.blocks import between_marks
from studies.hyper_connections.wired import CHOICES

PAGE, RAW = "studies/hyper_connections/HYPER_CONNECTIONS.md", "benchmarks/results/hyper_connections_cpu.json"


def values(runs: list[dict[str, Any]], wiring: str, choice: str, key: str) -> list[float]:
    """The KL of trained models by seed; under the key ``random`` that of the models that were not trained."""
    random, key = key == "random", "kl" if key == "random" else key
    found = [run for run in runs if (run["wiring"], run["choice"]) == (wiring, choice)]
    return [run[key] for run in sorted(found, key=lambda run: run["seed"]) if random == (run["steps"] == 0)]


def table(runs: list[dict[str, Any]]) -> str:
    """Means over the seeds, with their standard errors; the last columns are differences within a seed."""
    columns = [(wiring, key) for wiring in ("ladder", "farskip") for key in ("random", "kl", "kl_healed")]
    names = {"random": "random weights", "kl": "trained, rewired", "kl_healed": "healed"}
    heads = [f"{wiring}, {names[key]}" for wiring, key in columns]
    heads += [f"{wiring}, healed, less than `carried`" for wiring in ("ladder", "farskip")]
    rows = [["choice", *heads], ["---"] * (len(heads) + 1)]
    for name in CHOICES:
        cells = [mean(values(runs, wiring, name, key)) for wiring, key in columns]
        for wiring in ("ladder", "farskip"):
            own, base = (values(runs, wiring, one, "kl_healed") for one in (name, "carried"))
            paired = [b - a for a, b in zip(own, base, strict=True)]
            cells.append(mean(paired) if name != "carried" else "")
        rows.append([f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def mean(found: list[float]) -> str:
    return f"{statistics.mean(found):.3f} ± {statistics.stdev(found) / len(found) ** 0.5:.3f}"


def filled(text: str, root: Path) -> str:
    """The page with the table of the stored results."""
    return between_marks(text, {"table": table(json.loads((root / RAW).read_text())["runs"]) + "\n"})


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    (root / PAGE).write_text(filled((root / PAGE).read_text(), root))
