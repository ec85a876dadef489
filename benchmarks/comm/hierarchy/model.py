"""Predicts the time of each way from lines through measured transfers (HierMoE eq. 1 to 6), and compares the choice.

The parameters are measured in the same run, on other transfers than those that are predicted:

    near, far, direct   lines through the times of all-to-alls inside of nodes, between the ranks with the same place in
                        their nodes, and between all ranks of different nodes; one line for all if links are the same
    copy                the rate at which a kernel reads and writes memory
    fixed               for each way what a dispatch and a combine of a few tokens take beyond their lines: the exchange
                        of counts, the places of rows, the launches of kernels
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.comm.hierarchy.ways import DEDUP_OF
from torch import Tensor

from fcsd.bench.runner import timings
from fcsd.launch.world import World
from fcsd.parallel.cost import Dedup, Line, Links, Sent, fit, seconds_of, worst_error
from fcsd.parallel.expert.records import Layout
from fcsd.parallel.machine import Link, Machine
from fcsd.parallel.transports.transport import Splits, Transport, splits_of

_COPIED = {"cuda": 2**29, "cpu": 2**22}  # bytes of the copy whose rate is measured


@dataclass(frozen=True)
class Point:
    """What is known about a routing before it is timed.

    Attributes:
        tokens: tokens of a rank.
        top_k: experts of a token.
        width: values of a row, of two bytes each.
        rows: for each way the rows of the rank that has the most, from ``ways.counted``.
    """

    tokens: int
    top_k: int
    width: int
    rows: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Model:
    """The measured parameters.

    Attributes:
        links: the links, with ``direct``.
        fixed: seconds of each way, for dispatch and combine together.
        points: the measured ``(bytes, seconds)`` of each line, and its worst relative error.
        one_link: whether links inside of nodes and between them are the same; ``links.far`` is then their line, and
            rows to near and to far ranks travel one after the other.
    """

    links: Links
    fixed: Mapping[str, float]
    points: Mapping[str, tuple[list[tuple[float, float]], float]]
    one_link: bool = False

    def wire(self, way: str, point: Point) -> float:
        """Seconds of the transfers of dispatch and combine."""
        rows, two_levels = point.rows[way], way in ("2DH", "HD2")
        choices = 0 if way == "flat" else 1 if way == "2DH" else point.top_k
        record = Layout(point.width, choices, torch.bfloat16).record_bytes if choices else 2 * point.width
        total = 0.0
        for size in (record, 2 * point.width):
            near, far = rows["near"] * size, rows["far"] * size
            if self.one_link and not two_levels:
                near, far = 0, near + far
            total += seconds_of(Sent(near, far), self.links, "node" if two_levels else DEDUP_OF[way])
        return total

    def kernels(self, way: str, point: Point) -> float:
        """Seconds of the kernels that move rows: each reads or writes a row of a token, of a level, or of an expert."""
        pairs, handled = point.tokens * point.top_k, point.rows[way]["handled"]
        moved = 2 * point.tokens + 2 * handled  # packed for the first level, and summed after the last one
        if way != "flat":
            moved += 2 * handled + 2 * pairs  # forwarded or opened, and summed on the way back
        return moved * 2 * point.width / self.links.copy

    def predict(self, way: str, point: Point) -> float:
        """Seconds of dispatch and combine."""
        return self.fixed[way] + self.wire(way, point) + self.kernels(way, point)

    def chosen(self, point: Point) -> str:
        """The fastest of flat, HD1 and HD2 by the prediction."""
        return min(DEDUP_OF, key=lambda way: self.predict(way, point))


def measure_links(
    world: World, transport: Transport, node_size: int, one_link: bool, sizes: tuple[int, ...], width: int
) -> Model:
    """The lines and the rate of copies; ``fixed`` is 0. Every rank calls this.

    Args:
        transport: as the ways use it.
        node_size: ranks of a node.
        one_link: see ``Model``.
        sizes: the rows that a rank sends.
        width: values of a row.
    """
    points = {}
    for name, peers in _patterns(world.size, node_size, one_link).items():
        runs = {}
        for rows in sizes:
            each = max(1, rows // len(peers[0]))
            matrix = [[each if b in peers[a] else 0 for b in range(world.size)] for a in range(world.size)]
            splits = splits_of(matrix, world.rank)
            data = torch.zeros(sum(splits.sends), width, dtype=torch.bfloat16, device=world.device)
            runs[each * len(peers[0])] = partial(_exchange, transport, data, splits)
        timed = timings({str(rows): run for rows, run in runs.items()}, world.device, repeats=7)
        points[name] = [(float(rows) * 2 * width, timed[str(rows)].median / 1e3) for rows in runs]
    lines = {name: _line(of) for name, of in points.items()}
    lines = {**dict.fromkeys(("near", "far", "direct"), lines["all"]), **lines} if one_link else lines
    links = Links(node_size, lines["near"], lines["far"], 0.0, _copy_rate(world), 1.0, lines["direct"])
    return Model(
        links,
        dict.fromkeys(("flat", "2DH", "HD1", "HD2"), 0.0),
        {name: (of, worst_error(lines[name], of)) for name, of in points.items()},
        one_link,
    )


def machine_of(model: Model, gpu: str, measured: dict[str, Any]) -> Machine:
    """The machine file of what was measured; ``fixed`` counts a dispatch and a combine, of which each takes a half."""
    links = model.links
    fixed: dict[Dedup, float] = {DEDUP_OF[way]: model.fixed[way] / 2 * 1e6 for way in DEDUP_OF}
    near, far, direct = (None if line is None else Link.of(line) for line in (links.near, links.far, links.direct))
    assert near is not None
    rate = links.copy * 1e-12
    return Machine(
        gpu=gpu,
        gpus_per_node=links.per_node,
        near=near,
        far=far,
        direct=direct,
        fixed_us=fixed,
        copy_tb_per_s=rate,
        measured=measured,
    )


def _line(points: list[tuple[float, float]]) -> Line:
    """The fitted line; a time that does not grow with the bytes stands for 10^6 GB/s, as in ``Link.of``."""
    found = fit(points)
    return Line(found.alpha, max(found.beta, 1e-15))


def _patterns(ranks: int, node_size: int, one_link: bool) -> dict[str, list[list[int]]]:
    """For each line the ranks to which each rank sends."""
    node = [rank // node_size for rank in range(ranks)]
    every = range(ranks)
    if one_link:
        return {"all": [[b for b in every if b != a] for a in every]}
    return {
        "near": [[b for b in every if node[a] == node[b] and a != b] for a in every],
        "far": [[b for b in every if node[a] != node[b] and a % node_size == b % node_size] for a in every],
        "direct": [[b for b in every if node[a] != node[b]] for a in every],
    }


def _exchange(transport: Transport, rows: Tensor, splits: Splits) -> None:
    transport(rows, splits, dist.group.WORLD, False)[1].wait()


def _copy_rate(world: World) -> float:
    """Bytes per second that a copy on this device reads and writes together; the slowest rank's."""
    source = torch.zeros(_COPIED[world.device.type], dtype=torch.uint8, device=world.device)
    goal = torch.empty_like(source)
    took = timings({"copy": lambda: goal.copy_(source)}, world.device, repeats=7)["copy"].median
    return 2 * len(source) / (took / 1e3)
