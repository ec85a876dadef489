"""HierMoE's ablations of expert placement by counted rows, on imagined nodes, without a GPU.

    python studies/placement/ablation.py [--cluster imitated] [--out FILE]    two nodes of two ranks on one host
    python studies/placement/ablation.py --cluster hiermoe [--out FILE]       four nodes of eight, HierMoE's testbed
    python studies/placement/ablation.py --cluster hiermoe --paper            the same as the paper does it

Tokens have topics, which prefer some of the experts, and the popularity of topics changes from step to step
(``benchmarks.comm.hierarchy.routing``). A placement is found by the routing of one step and used from the next step on.
The rows that the busiest rank sends or receives are counted. The times of the wires are not measured: they follow from
the counted rows per token and from lines through all-to-alls, which were measured on four H200s
(benchmarks/results/hierarchy_4xh200.json), or which HierMoE gives for its testbed. ``python -m
benchmarks.comm.hierarchy --parts placement`` measures the same on GPUs.

With ``--paper`` one pair of experts changes places after every step, whatever the move costs (HierMoE eq. 10), and
every message is as long as if each group received as many rows as the fullest one (eq. 2, 4 and 5). fcsd itself takes
every swap that pays, and sends no padding.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.comm.hierarchy.model import Model, Point
from benchmarks.comm.hierarchy.placements import PERIODS, objectives
from benchmarks.comm.hierarchy.routing import Routing
from benchmarks.comm.hierarchy.ways import counted, levels_of
from benchmarks.out_file import out_file
from torch import Tensor

from fcsd.markdown import table
from fcsd.parallel.cost import Level, Line, Links, Rows, best_depth, paper_seconds
from fcsd.parallel.expert.levels import all_groups, pairs_by_group, row_matrices, tokens_by_group
from fcsd.parallel.placement.placement import Placement
from fcsd.parallel.placement.search import Objective, greedy

WIDTH, STEPS, TOP_K, STUDIED = 2048, 8, (6, 8, 10), 8
MEASURED = Path("benchmarks/results/hierarchy_4xh200.json")
# HierMoE's testbed, four nodes of eight A6000: all-to-alls inside of a node, between nodes, and between all ranks.
HIERMOE = {"near": Line(0.571e-3, 1.27e-10), "far": Line(0.497e-3, 5.29e-10), "direct": Line(0.722e-3, 5.70e-10)}


@dataclass(frozen=True)
class Cluster:
    """Imagined nodes.

    Attributes:
        nodes: the number of nodes.
        node_size: ranks of a node.
        experts: routed experts of the layer.
        tokens: tokens of a rank whose rows are counted in a step.
        timed: tokens of a rank for which the times of the wires are predicted.
        lines: ``near``, ``far`` and ``direct`` of ``fcsd.parallel.cost.Links``.
    """

    nodes: int
    node_size: int
    experts: int
    tokens: int
    timed: int
    lines: Mapping[str, Line]

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.node_size

    @property
    def links(self) -> Links:
        """The links; nothing but their lines is used."""
        near, far, direct = (self.lines[name] for name in ("near", "far", "direct"))
        return Links(self.node_size, near, far, 0.0, 1.0, 1.0, direct)

    def choose(self, routing: Routing, step: int) -> Tensor:
        """The experts that the tokens of every rank choose in a step, ``[ranks, tokens, top_k]``."""
        return torch.stack([routing.choose(self.tokens, rank, step, torch.device("cpu")) for rank in range(self.ranks)])

    def mean_of(self, steps: Sequence[Tensor], placements: Sequence[Placement], way: str) -> dict[str, float]:
        """The mean rows per token of the busiest rank, and the mean predicted milliseconds of dispatch and combine.

        The first step is left out, because no placement can know its routing.
        """
        levels = levels_of(self.ranks, self.node_size)[way]
        total: dict[str, float] = dict.fromkeys(("far", "near", "wire_ms"), 0.0)
        for chosen, placement in list(zip(steps, placements, strict=True))[1:]:
            told = all_groups(placement.positions(chosen), self.experts, levels)
            rows = counted(row_matrices(told, levels), self.node_size)
            scaled = {name: round(count * self.timed / self.tokens) for name, count in rows.items()}
            seconds = Model(self.links, {}, {}).wire(way, Point(self.timed, chosen.shape[-1], WIDTH, {way: scaled}))
            values = {"far": rows["far"] / self.tokens, "near": rows["near"] / self.tokens, "wire_ms": 1e3 * seconds}
            total = {name: total[name] + value for name, value in values.items()}
        return {name: value / (len(steps) - 1) for name, value in total.items()}

    def paper_seconds_of(self, steps: Sequence[Tensor], placements: Sequence[Placement]) -> list[float]:
        """The paper's mean seconds of dispatch and combine: flat, and with deduplication by one and two levels.

        The first step is left out, as in ``mean_of``.
        """
        two = [Level(self.nodes, self.lines["far"], self.lines["near"])]
        times = []
        for chosen, placement in list(zip(steps, placements, strict=True))[1:]:
            positions = placement.positions(chosen)
            padded = [self.ranks * int(pairs_by_group(positions, self.experts, self.ranks).max()) / self.tokens]
            for groups in (self.nodes, self.ranks):
                padded.append(groups * int(tokens_by_group(positions, self.experts, groups).max()) / self.tokens)
            rows = Rows(self.timed, chosen.shape[-1], self.experts, self.ranks, WIDTH)
            times.append([2 * seconds for seconds in paper_seconds(rows, self.lines["direct"], two, padded)])
        return [sum(of) / len(of) for of in zip(*times, strict=True)]


def imitated() -> Cluster:
    """Two nodes of two ranks, with the lines of the slow link that were measured on four H200s."""
    told = json.loads(MEASURED.read_text())["models"]["slow"]["lines"]
    return Cluster(2, 2, 64, tokens=2048, timed=16384, lines={name: Line(**line) for name, line in told.items()})


def hiermoe() -> Cluster:
    """HierMoE's testbed with the layers and the tokens of its Qwen3 (Table IV)."""
    return Cluster(4, 8, 128, tokens=512, timed=1024, lines=HIERMOE)


CLUSTERS = {"imitated": imitated, "hiermoe": hiermoe}


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=CLUSTERS, default="imitated")
    parser.add_argument("--paper", action="store_true", help="one pair after every step, and padded messages")
    parser.add_argument("--out", type=out_file, help="write the numbers as JSON")
    args = parser.parse_args()
    cluster = CLUSTERS[args.cluster]()
    found = study_of_paper(cluster) if args.paper else study(cluster)
    print(text_of_paper(found) if args.paper else to_text(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def study(cluster: Cluster, steps: int = STEPS) -> dict[str, Any]:
    """The rows of each way, and for HD2 those with each period and each objective of the search."""
    found: dict[str, Any] = {name: getattr(cluster, name) for name in ("nodes", "node_size", "experts", "tokens")}
    found |= {"steps": steps, "top_k": [], "placed": []}
    goals = objectives(cluster.links, cluster.ranks)
    for top_k in TOP_K:
        routing = Routing(cluster.experts, top_k, topical=True)
        chosen = [cluster.choose(routing, step) for step in range(steps)]
        unmoved = [Placement(cluster.experts, cluster.ranks)] * steps
        for way in ("flat", "2DH", "HD1", "HD2"):
            found["top_k"].append({"top_k": top_k, "way": way, **cluster.mean_of(chosen, unmoved, way)})
        cases = [("smooth-max", 1)]
        if top_k == STUDIED:
            cases = [*(("smooth-max", period) for period in PERIODS), *((name, 1) for name in list(goals)[1:])]
        for name, period in cases:
            placements, swaps = searched(chosen, unmoved[0], goals[name], period)
            row = {"top_k": top_k, "objective": name, "period": period, **cluster.mean_of(chosen, placements, "HD2")}
            found["placed"].append({**row, "swaps": swaps})
            print(row, file=sys.stderr)
    return found


def study_of_paper(cluster: Cluster, steps: int = STEPS) -> dict[str, Any]:
    """The paper's predictions for each number of chosen experts, without swaps and with one pair after every step."""
    goal = objectives(cluster.links, cluster.ranks)["smooth-max"]
    found: dict[str, Any] = {name: getattr(cluster, name) for name in ("nodes", "node_size", "experts", "tokens")}
    found |= {"steps": steps, "top_k": []}
    for top_k in TOP_K:
        routing = Routing(cluster.experts, top_k, topical=True)
        chosen = [cluster.choose(routing, step) for step in range(steps)]
        unmoved = Placement(cluster.experts, cluster.ranks)
        placements, _ = searched(chosen, unmoved, goal, period=1, most=1)
        flat, *deduplicated = cluster.paper_seconds_of(chosen, [unmoved] * steps)
        depth = best_depth([flat, *deduplicated])
        swapped = cluster.paper_seconds_of(chosen, placements)[depth]
        row = {"top_k": top_k, "flat_ms": 1e3 * flat, **{f"HD{d}_ms": 1e3 * s for d, s in enumerate(deduplicated, 1)}}
        found["top_k"].append({**row, "depth": depth, "swapped_ms": 1e3 * swapped})
    return found


def text_of_paper(found: dict[str, Any]) -> str:
    """A table of ``study_of_paper``."""
    rows = []
    for row in found["top_k"]:
        best = row[f"HD{row['depth']}_ms"] if row["depth"] else row["flat_ms"]
        cells = [f"{row[name]:.2f}" for name in ("flat_ms", "HD1_ms", "HD2_ms", "swapped_ms")]
        rows.append([str(row["top_k"]), *cells[:3], str(row["depth"]), cells[3], f"{best / row['swapped_ms']:.3f}x"])
    return table(["top k", "flat, ms", "HD1", "HD2", "d*", "d* + swap, ms", "speed-up by swaps"], rows, left=1)


def searched(
    steps: Sequence[Tensor], placement: Placement, goal: Objective, period: int, most: int | None = None
) -> tuple[list[Placement], list[int]]:
    """The placement of each step if experts may move every ``period`` steps, and the swaps of each search.

    Args:
        most: the largest number of swaps of a search; None takes all that save rows.
    """
    placements, swaps = [], []
    for number, chosen in enumerate(steps):
        placements.append(placement)  # found by the steps before
        if number % period == 0 and number < len(steps) - 1:
            [placement], count = greedy([chosen.flatten(0, 1)], [placement], goal, most)
            swaps.append(count)
    return placements, swaps


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
