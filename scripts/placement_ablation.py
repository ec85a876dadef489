"""HierMoE's ablations of expert placement by counted rows, for two nodes of two ranks, without a GPU.

    python scripts/placement_ablation.py [--tokens 2048] [--out FILE]

Tokens have topics, which prefer some of 64 experts, and the popularity of topics changes from step to step
(``fcsd.bench.hierarchy.routing``). A placement is found by the routing of one step and used from the next step on. The
rows that the busiest rank sends or receives are counted in eight steps. The times of the wires are not measured: they
follow, for 16384 tokens of a rank, from the counted rows per token and the lines that were measured on four H200s
(docs/results/hierarchy_4xh200.json).
``python -m fcsd.bench.hierarchy --parts placement`` measures the same on GPUs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.bench.hierarchy.model import Model, Point
from fcsd.bench.hierarchy.placements import BALANCES, PERIODS
from fcsd.bench.hierarchy.routing import Routing
from fcsd.bench.hierarchy.ways import counted, levels_of
from fcsd.markdown import table
from fcsd.parallel.cost import Line, Links
from fcsd.parallel.expert.levels import all_groups, row_matrices
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.placing.search import Level, Objective, greedy

RANKS, NODE_SIZE, EXPERTS, WIDTH, STEPS = 4, 2, 64, 2048, 8
TOKENS = 16384  # tokens of a rank for which the times of the wires are predicted
MEASURED = Path("docs/results/hierarchy_4xh200.json")


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a rank in a step")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    found = study(measured_model(), args.tokens)
    print(to_text(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def measured_model() -> Model:
    """The lines of the slow link that were measured on four H200s."""
    told = json.loads(MEASURED.read_text())["models"]["slow"]
    near, far, direct = (Line(**told["lines"][name]) for name in ("near", "far", "direct"))
    return Model(Links(NODE_SIZE, near, far, 0.0, told["copy"], 1.0, direct), told["fixed"], {})


def study(model: Model, tokens: int) -> dict[str, Any]:
    """The rows of each way, and for HD2 those with each period and each objective of the search."""
    found: dict[str, Any] = {"tokens": tokens, "experts": EXPERTS, "steps": STEPS, "top_k": [], "placed": []}
    goals = {name: objective(model, Objective((), True, balance=name)) for name in BALANCES}
    goals["pairs (SmartMoE)"] = Objective((Level(RANKS, 1.0),), deduplicated=False)
    for top_k in (6, 8, 10):
        routing = Routing(EXPERTS, top_k, topical=True)
        steps = [of_all_ranks(routing, tokens, step) for step in range(STEPS)]
        fixed = [Placement(EXPERTS, RANKS)] * STEPS
        for way in ("flat", "2DH", "HD1", "HD2"):
            found["top_k"].append({"top_k": top_k, "way": way, **mean_of(model, steps, fixed, way)})
        cases = [("smooth-max", 1)]
        if top_k == 8:
            cases = [*(("smooth-max", period) for period in PERIODS), *((name, 1) for name in list(goals)[1:])]
        for name, period in cases:
            placements, swaps = searched(steps, goals[name], period)
            row = {"top_k": top_k, "objective": name, "period": period, **mean_of(model, steps, placements, "HD2")}
            found["placed"].append({**row, "swaps": swaps})
            print(row, file=sys.stderr)
    return found


def of_all_ranks(routing: Routing, tokens: int, step: int) -> Tensor:
    """The experts that the tokens of every rank choose in a step, ``[ranks, tokens, top_k]``."""
    return torch.stack([routing.choose(tokens, rank, step, torch.device("cpu")) for rank in range(RANKS)])


def objective(model: Model, like: Objective) -> Objective:
    """The rows of the busiest rank and node, weighted by the measured links, with the balance of ``like``."""
    assert model.links.far is not None
    between = Level(RANKS // NODE_SIZE, model.links.far.beta / model.links.near.beta / NODE_SIZE)
    return Objective((between, Level(RANKS, 1.0)), deduplicated=True, balance=like.balance)


def searched(steps: Sequence[Tensor], goal: Objective, period: int) -> tuple[list[Placement], list[int]]:
    """The placement of each step if experts may move every ``period`` steps, and the swaps of each search."""
    placement, placements, swaps = Placement(EXPERTS, RANKS), [], []
    for number, chosen in enumerate(steps):
        placements.append(placement)  # found by the steps before
        if number % period == 0 and number < len(steps) - 1:
            [placement], count = greedy([chosen.flatten(0, 1)], [placement], goal)
            swaps.append(count)
    return placements, swaps


def mean_of(model: Model, steps: Sequence[Tensor], placements: Sequence[Placement], way: str) -> dict[str, float]:
    """The mean rows per token of the busiest rank, and the mean predicted milliseconds of dispatch and combine.

    The milliseconds are those of ``TOKENS`` tokens with as many rows per token. The first step is left out, because no
    placement can know its routing.
    """
    levels = levels_of(RANKS, NODE_SIZE)[way]
    total: dict[str, float] = dict.fromkeys(("far", "near", "wire_ms"), 0.0)
    for chosen, placement in list(zip(steps, placements, strict=True))[1:]:
        tokens, top_k = chosen.shape[1:]
        told = all_groups(placement.positions(chosen), EXPERTS, levels)
        rows = counted(row_matrices(told, levels), NODE_SIZE)
        scaled = {name: round(count * TOKENS / tokens) for name, count in rows.items()}
        seconds = model.wire(way, Point(TOKENS, top_k, WIDTH, {way: scaled}))
        values = {"far": rows["far"] / tokens, "near": rows["near"] / tokens, "wire_ms": 1e3 * seconds}
        total = {name: total[name] + value for name, value in values.items()}
    return {name: value / (len(steps) - 1) for name, value in total.items()}


def to_text(found: dict[str, Any]) -> str:
    """The ways for each number of chosen experts, and what swaps change of HD2."""

    def cells(row: dict[str, Any]) -> list[str]:
        return [f"{row['far']:.3f}", f"{row['near']:.3f}", f"{row['wire_ms']:.2f}"]

    columns = ["far rows", "near rows", "wire, predicted ms"]
    ways = table(["top k", "way", *columns], [[str(r["top_k"]), r["way"], *cells(r)] for r in found["top_k"]], left=2)
    plain = {row["top_k"]: row["wire_ms"] for row in found["top_k"] if row["way"] == "HD2"}
    rows = [
        [
            str(row["top_k"]),
            row["objective"],
            str(row["period"]),
            *cells(row),
            f"{plain[row['top_k']] / row['wire_ms']:.3f}x",
            ", ".join(map(str, row["swaps"])),
        ]
        for row in found["placed"]
    ]
    head = ["top k", "objective", "period", *columns, "speed-up by swaps", "swaps of each search"]
    return f"{ways}\n\n{table(head, rows, left=2)}"


if __name__ == "__main__":
    main()
