"""Prints the cases of ``heal`` that heal the cells of the frontier, and ask them the benchmarks.

    python -m studies.real cells [WIRING ...] > CASES

All cells are healed by one recipe. ``WIRING`` is a name as ``predictions`` prints it, such as
``desync-2x`` or ``ladder attn-only``; without one, all are printed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from studies.real import frontier
from studies.real.predictions import SHARES

from fcsd.errors import unknown_value
from fcsd.models.selection import cheapest, layers_text, select_layers

ARGUMENTS = {"wirings": dict(nargs="*", metavar="WIRING")}
RECIPE: dict[str, Any] = {
    "text": "own+doc+foreign",
    "tokens": 6_000_000,
    "batch": 32768,
    "lr": 1e-3,
    "seed": 0,
    "eval": True,
}
SET = {"optim.train": ["converted"], "data.held_out.max_rows": 60, "train.eval_every": 100_000}
RANKS = 3  # simulated under Desync: the model has three heads of keys and values
MICRO = 8  # rows at a time under Desync, whose activations are those of all ranks


def cases(repo: Path = Path()) -> list[dict[str, Any]]:
    """A case for each cell: for each wiring the last layers first, then those that cost least alone."""
    found = []
    for wiring in (name for name in frontier.labels() if name not in frontier.ALIKE[1:]):
        desync = wiring.startswith("desync")
        # A single layer leaves nothing out under desync-4x that it keeps under desync-2x.
        alone = dict(enumerate(frontier.costs(repo)["desync-2x" if desync else wiring]))
        for choice in frontier.CHOICES:
            for share in SHARES if choice == "last" else SHARES[:-1]:
                layers, of = share, [choice, share.rstrip("%")]
                if share == SHARES[-1]:
                    layers, of = "all", ["all"]
                elif choice != "last":
                    layers = layers_text(cheapest(alone, len(select_layers(share, len(alone)))))
                case = {"name": "-".join([*wiring.split(), *of]), "wiring": wiring, "layers": layers, **RECIPE}
                if desync:
                    case |= {"tp_degree": RANKS, "set": {**SET, "train.micro_batch_size": MICRO}}
                found.append({"set": SET, **case})
    return found


def main(given: argparse.Namespace) -> None:
    """Print the cases of the wirings that the arguments name."""
    for wiring in given.wirings:
        if wiring not in frontier.labels():
            raise unknown_value("wiring", wiring, frontier.labels())
    for case in cases():
        if not given.wirings or case["wiring"] in given.wirings:
            print(json.dumps(case))
