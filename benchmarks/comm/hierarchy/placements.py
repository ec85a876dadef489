"""What expert placement changes in the time of dispatch and combine, and how long searches and moves take.

The routing is that of topics whose popularity changes from step to step. A placement is found by the routing of one
step and used from the next step on, as in training.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.comm.hierarchy.measure import Bench, by_step
from benchmarks.comm.hierarchy.model import Model
from benchmarks.comm.hierarchy.routing import Routing

from fcsd.bench.runner import finished
from fcsd.launch.world import World, barrier
from fcsd.parallel.cost import Links
from fcsd.parallel.placement.moving import Share, move, plan
from fcsd.parallel.placement.placement import Placement
from fcsd.parallel.placement.search import Balance, Level, Objective, Ranks, greedy

PERIODS = (1, 2, 4, 8)
BALANCES: tuple[Balance, ...] = ("smooth-max", "max", "log-sum-exp")


def objectives(links: Links, ranks: int) -> dict[str, Objective]:
    """What the searches minimise, by name. Moves are free.

    Each of ``BALANCES`` takes the rows of the busiest rank and of the busiest node, weighted by the links. SmartMoE
    takes the pairs of token and expert of the busiest rank.
    """
    assert links.far is not None, "there are several nodes"
    between = Level(ranks // links.per_node, links.far.beta / links.near.beta / links.per_node)
    levels = between, Level(ranks, 1.0)
    found = {name: Objective(levels, name) for name in BALANCES}
    return {**found, "pairs (SmartMoE)": Objective((Level(ranks, 1.0, deduplicated=False),))}


class Searcher:
    """Searches placements for one routing, and notes how long that takes.

    Args:
        hosts: the ranks in a group whose collectives do not involve a device.
    """

    def __init__(self, bench: Bench, hosts: World, routing: Routing) -> None:
        self._bench, self._hosts, self._routing = bench, hosts, routing
        self._ranks = Ranks(bench.world.rank, bench.world.size, _summed, hosts.everywhere)
        self.seconds: list[float] = []
        self.swaps: list[int] = []

    def placements(self, goal: Objective, period: int) -> dict[int, Placement]:
        """The placement of each step by its number, if experts may change places every ``period`` steps.

        Step 0 is searched first. The steps begin with 1, because the routing of step 0 has no earlier one.
        """
        sizes = self._bench.sizes
        placement = Placement(self._routing.experts, self._bench.world.size)
        found = {}
        for step in range(sizes.steps):
            if step % period == 0:
                chosen = self._bench.choose(self._routing, sizes.tokens, step)
                start = finished(chosen.device)
                [placement], swaps = greedy([chosen], [placement], goal, together=self._ranks)
                taken = finished(chosen.device) - start
                self.seconds.append(max(self._hosts.everywhere(lambda taken=taken: taken)))
                self.swaps.append(swaps)
            found[step + 1] = placement
        return found


def _summed(counts: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(counts)
    return counts


def study(bench: Bench, model: Model, hosts: World, found: dict[str, Any], write: Callable[[], None]) -> None:
    """HierMoE's ablations: each number of chosen experts, and for one of them each period and each objective.

    Every rank calls this. Times are means over steps, in seconds.

    Args:
        found: is filled with the results.
        write: is called after each row.
    """
    sizes = bench.sizes
    found |= {"steps": sizes.steps, "top_k": [], "period": [], "balance": []}
    goals = objectives(model.links, bench.world.size)
    for routing in sizes.placed:
        unmoved = Placement(routing.experts, bench.world.size)
        fixed = dict.fromkeys(range(1, sizes.steps + 1), unmoved)
        seconds = by_step(bench, routing, fixed, ("flat", "2DH", "HD1", "HD2"))
        chosen = bench.choose(routing, sizes.tokens)
        best = model.chosen(bench.point(chosen, bench.matrices(chosen, unmoved)))
        searcher = Searcher(bench, hosts, routing)
        moved = searcher.placements(goals["smooth-max"], period=1)
        swapped = by_step(bench, routing, moved, (best,))
        row = {**asdict(routing), **seconds, "chosen": best}
        for kind in ("", ", wire"):
            row |= {f"d*{kind}": seconds[best + kind], f"d* + swap{kind}": swapped[best + kind]}
        found["top_k"].append({**row, "search": searcher.seconds, "swaps": searcher.swaps})
        write()
    routing = sizes.placed[min(1, len(sizes.placed) - 1)]
    rows = [("period", str(period), goals["smooth-max"], period) for period in PERIODS]
    rows += [("balance", name, goal, 1) for name, goal in goals.items()]
    for kind, name, goal, period in rows:
        searcher = Searcher(bench, hosts, routing)
        placements = searcher.placements(goal, period)
        seconds = by_step(bench, routing, placements, ("HD2",))
        row = {kind: name, **asdict(routing), **seconds}
        found[kind].append({**row, "search": searcher.seconds, "swaps": searcher.swaps})
        write()


def moves(bench: Bench, numbers: Mapping[str, int]) -> dict[str, Any]:
    """The seconds in which experts move with their fp32 weights and moments, as between two steps of training.

    Args:
        numbers: ``experts`` of the layer, and ``size``, the weights of an expert.
    """
    world, experts, size = bench.world, numbers["experts"], numbers["size"]
    before = Placement(experts, world.size)
    kinds = {"weight": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    elements = before.slots * size
    shares = {
        name: Share(0, torch.full((elements,), float(world.rank), dtype=dtype, device=world.device))
        for name, dtype in kinds.items()
    }
    held = [{name: share.interval for name, share in shares.items()}] * world.size
    found: dict[str, Any] = {**numbers, "bytes": size * sum(dtype.itemsize for dtype in kinds.values()), "seconds": {}}
    slots, far = before.slots, bench.node_size * before.slots
    pairs = {"near, 1": [(0, slots)], "far, 1": [(0, far)], "far, 4": [(n, far + n) for n in range(min(4, slots))]}
    for name, swaps in pairs.items():
        after = before
        for one, other in swaps:
            after = after.swapped(one, other)
        pieces = plan(before, after, held, dict.fromkeys(kinds, size))
        run = partial(move, shares, pieces, world.rank, world.size)
        taken = []
        for _ in range(4):  # the first one does not count
            barrier()
            start = finished(world.device)
            run()
            taken.append(finished(world.device) - start)
        found["seconds"][name] = max(world.everywhere(lambda taken=taken: sorted(taken[1:])[1]))
    return found
