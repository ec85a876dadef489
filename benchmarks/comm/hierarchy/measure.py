"""Measures one transport: the lines, the table of ways, the sweep, and what expert placement changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from benchmarks.comm.hierarchy import ways
from benchmarks.comm.hierarchy.block import block_of, exact_factors, exact_rows, exact_scores, without_moving
from benchmarks.comm.hierarchy.model import Model, Point, measure_links
from benchmarks.comm.hierarchy.routing import Routing
from torch import Tensor

from fcsd.bench.runner import timings
from fcsd.launch.world import World
from fcsd.parallel.expert.dispatcher import Transfer
from fcsd.parallel.expert.records import Layout
from fcsd.parallel.placement.placement import Placement
from fcsd.parallel.transports.transport import Transport


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurement.

    Attributes:
        width: values of a row.
        tokens: tokens of a rank in the table and in the study of placements.
        table: the routings of the table.
        sweep_tokens: tokens of a rank in the sweep.
        sweep: the routings of the sweep.
        few: tokens of a rank with which the fixed times are measured.
        lines: rows of the transfers through which the lines are fitted.
        repeats: how often each way is timed.
        placed: the routings of the study of placements; periods and objectives are compared for the second one.
        steps: training steps in the study of placements.
    """

    width: int = 2048
    tokens: int = 16384
    table: tuple[Routing, ...] = (Routing(64, 6), Routing(128, 8), Routing(128, 10))
    sweep_tokens: tuple[int, ...] = (128, 512, 2048, 8192)
    sweep: tuple[Routing, ...] = tuple(
        Routing(experts, top_k, topical)
        for experts, top_k in ((64, 2), (64, 6), (128, 8), (128, 10))
        for topical in (False, True)
    )
    few: int = 32
    lines: tuple[int, ...] = (32, 128, 512, 2048, 8192, 32768)
    repeats: int = 9
    placed: tuple[Routing, ...] = (Routing(128, 6, True), Routing(128, 8, True), Routing(128, 10, True))
    steps: int = 8


@dataclass(frozen=True)
class Bench:
    """A transport between ranks in nodes, and the model of its times.

    Attributes:
        world: this rank.
        node_size: ranks of a node.
        transport: sends the rows.
        one_link: whether rows inside of nodes and between them take the same link, one after the other.
        side: the CUDA stream for the exchange of counts; None on CPUs.
        sizes: the sizes of the measurement.
    """

    world: World
    node_size: int
    transport: Transport
    one_link: bool
    side: "torch.cuda.Stream | None"
    sizes: Sizes

    @property
    def transfer(self) -> Transfer:
        """How rows travel, with the kernels that training uses."""
        return Transfer(self.transport, side=self.side, fused=self.world.device.type == "cuda")

    def choose(self, routing: Routing, tokens: int, step: int = 0) -> Tensor:
        """The experts of this rank's tokens, ``[tokens, top_k]``."""
        return routing.choose(tokens, self.world.rank, step, self.world.device)

    def runs(self, chosen: Tensor, placement: Placement, checked: bool = True) -> dict[str, Callable[[], Tensor]]:
        """For each way a function that sends the rows of tokens to their experts and back.

        Raises:
            FcsdError: ``checked`` and a way returns wrong values.
        """
        x = exact_rows(len(chosen), self.sizes.width, self.world.rank, self.world.device)
        levels = ways.levels_of(self.world.size, self.node_size)
        makes = {name: ways.maker(name, of) for name, of in levels.items()}
        scores = exact_scores(chosen)
        if checked:
            factors = exact_factors(placement.experts, self.world.device)
            exact = block_of(chosen, scores, placement, self.world.rank, factors)
            expected = without_moving(x, chosen, factors)
            found = {name: ways.there_and_back(make, exact, x, self.transfer) for name, make in makes.items()}
            self.world.everywhere(lambda: [ways.check(one, expected, name) for name, one in found.items()])
        block = block_of(chosen, scores, placement, self.world.rank, None)
        return {name: partial(ways.there_and_back, make, block, x, self.transfer) for name, make in makes.items()}

    def matrices(self, chosen: Tensor, placement: Placement) -> dict[str, Tensor]:
        """For each way the rows that ranks send to each other, as in ``ways.matrices_of``."""
        positions = placement.positions(chosen)
        levels = ways.levels_of(self.world.size, self.node_size)
        return {name: ways.matrices_of(positions, placement.experts, of) for name, of in levels.items()}

    def wires(self, routing: Routing, matrices: Mapping[str, Tensor]) -> dict[str, Callable[[], None]]:
        """For each way, named ``WAY, wire``, a function that sends as many rows and does nothing else.

        Args:
            matrices: the rows of the ways, from ``matrices``.
        """
        found = {}
        for name, levels in ways.levels_of(self.world.size, self.node_size).items():
            choices = [levels.choices(level, routing.experts, routing.top_k) for level in range(levels.depth)]
            layouts = [Layout(self.sizes.width, each, torch.bfloat16) for each in choices]
            found[f"{name}, wire"] = ways.wire_alone(levels, layouts, matrices[name], self.transport, self.world)
        return found

    def point(self, chosen: Tensor, matrices: Mapping[str, Tensor]) -> Point:
        """What the model needs to know about a routing."""
        rows = {name: ways.counted(of, self.node_size) for name, of in matrices.items()}
        tokens, top_k = chosen.shape
        return Point(tokens, top_k, self.sizes.width, rows)

    def timed(self, runs: Mapping[str, Callable[[], Any]], repeats: int | None = None) -> dict[str, float]:
        """Median seconds of each function, on the slowest rank."""
        found = timings(runs, self.world.device, repeats or self.sizes.repeats)
        return {name: one.median / 1e3 for name, one in found.items()}


def model_of(bench: Bench) -> Model:
    """The measured lines, the rate of copies, and the fixed time of each way."""
    sizes = bench.sizes
    model = measure_links(bench.world, bench.transport, bench.node_size, bench.one_link, sizes.lines, sizes.width)
    placement = Placement(sizes.table[0].experts, bench.world.size)
    chosen = bench.choose(sizes.table[0], sizes.few)
    point = bench.point(chosen, bench.matrices(chosen, placement))
    taken = bench.timed(bench.runs(chosen, placement), 3 * sizes.repeats)
    fixed = {way: max(0.0, seconds - model.predict(way, point)) for way, seconds in taken.items()}
    return replace(model, fixed=fixed)


def one_point(bench: Bench, model: Model, routing: Routing, tokens: int, wire_alone: bool = False) -> dict[str, Any]:
    """The measured and the predicted seconds of each way for one routing, and the choice of the model."""
    placement = Placement(routing.experts, bench.world.size)
    chosen = bench.choose(routing, tokens)
    matrices = bench.matrices(chosen, placement)
    point = bench.point(chosen, matrices)
    runs: dict[str, Callable[[], Any]] = dict(bench.runs(chosen, placement))
    if wire_alone:
        runs |= bench.wires(routing, matrices)
    measured = bench.timed(runs)
    predicted = {way: model.predict(way, point) for way in point.rows}
    found = {**asdict(routing), "tokens": tokens, "rows": point.rows, "seconds": measured, "predicted": predicted}
    best = min(ways.DEDUP_OF, key=lambda way: measured[way])
    return {**found, "chosen": model.chosen(point), "best": best}


def swept(bench: Bench, model: Model) -> list[dict[str, Any]]:
    """``one_point`` for every routing and number of tokens of the sweep."""
    sizes = bench.sizes
    return [one_point(bench, model, routing, tokens) for tokens in sizes.sweep_tokens[::-1] for routing in sizes.sweep]


def by_step(
    bench: Bench, routing: Routing, placements: Mapping[int, Placement], names: Sequence[str]
) -> dict[str, float]:
    """Mean seconds of some ways, and of their wires alone, over steps whose routing changes.

    Args:
        placements: where the experts are in each step, by its number.
        names: the ways.
    """
    every = [*names, *(f"{name}, wire" for name in names)]
    total = dict.fromkeys(every, 0.0)
    for step, placement in placements.items():
        chosen = bench.choose(routing, bench.sizes.tokens, step)
        runs: dict[str, Callable[[], Any]] = dict(bench.runs(chosen, placement, checked=step == min(placements)))
        runs |= bench.wires(routing, bench.matrices(chosen, placement))
        taken = bench.timed({name: runs[name] for name in every}, min(3, bench.sizes.repeats))
        total = {name: total[name] + taken[name] for name in every}
    return {name: seconds / len(placements) for name, seconds in total.items()}
