"""The ways of rows to the experts and back that the benchmark compares.

flat   a row for each token and expert, sent directly; rows inside of nodes and between nodes travel at once
2DH    the same rows by two levels, between nodes first and then inside of the node, as HierMoE describes it
HD1    a row for each token and rank (``parallel.dedup: rank``)
HD2    a row for each token and node, forwarded inside of the node (``parallel.dedup: node``)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.errors import FcsdError
from fcsd.launch.world import World
from fcsd.parallel.cost import Dedup
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.choice import busiest
from fcsd.parallel.expert.dispatcher import Dispatcher, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.expert.hierarchical import hierarchical
from fcsd.parallel.expert.levels import Levels, all_groups, one_level, row_matrices, two_levels
from fcsd.parallel.expert.records import Layout
from fcsd.parallel.transports.transport import Transport, splits_of

DEDUP_OF: Mapping[str, Dedup] = {"flat": "off", "HD1": "rank", "HD2": "node"}  # what `parallel.dedup` can choose


def levels_of(ranks: int, node_size: int) -> dict[str, Levels]:
    """The levels of each way, by its name."""
    two = two_levels(ranks, node_size)
    return {
        "flat": Levels((ranks,), deduplicated=False),
        "2DH": replace(two, deduplicated=False),
        "HD1": one_level(ranks),
        "HD2": two,
    }


def maker(name: str, levels: Levels) -> Dispatcher:
    """The dispatcher of a way."""
    return flat if name == "flat" else hierarchical(levels)


@torch.no_grad()
def there_and_back(dispatcher: Dispatcher, block: ExpertBlock, x: Tensor, transfer: Transfer) -> Tensor:
    """Dispatch and combine of the forward pass, each awaited at once: ``[1, tokens, width] -> [1, tokens, width]``."""
    return dispatcher(block, 0, x, transfer).dispatch(None).combine(None).land()


def check(found: Tensor, expected: Tensor, name: str) -> None:
    """Compare a result with the computation without any exchange.

    Raises:
        FcsdError: any value differs.
    """
    if not torch.equal(found, expected):
        raise FcsdError(f"{name}: {int((found != expected).sum())} of {found.numel()} values are wrong")


def matrices_of(positions: Tensor, experts: int, levels: Levels) -> Tensor:
    """The rows that ranks send to each other at each level, ``[depth, senders, receivers]`` on the CPU.

    Every rank calls this.

    Args:
        positions: ``[tokens, top_k]``, the positions of the experts that this rank's tokens chose.
    """
    own = all_groups(positions, experts, levels)
    everyone = [torch.empty_like(own) for _ in range(levels.ranks)]
    dist.all_gather(everyone, own)
    return row_matrices(torch.stack(everyone).cpu(), levels)


def counted(matrices: Tensor, node_size: int) -> dict[str, int]:
    """The rows of the rank that has the most, over each kind of link, and those that a rank handles at each level."""
    near, far = busiest(matrices, node_size)
    handled = sum(max(int(one.sum(0).max()), int(one.sum(1).max())) for one in matrices)
    return {"near": near, "far": far, "handled": handled}


def wire_alone(
    levels: Levels, layouts: list[Layout], matrices: Tensor, transport: Transport, world: World
) -> Callable[[], None]:
    """A function that sends the rows of dispatch and combine, level by level, and does nothing else."""
    there = [splits_of(one.tolist(), world.rank) for one in matrices]
    back = [splits_of(one.T.tolist(), world.rank) for one in matrices]
    steps = []
    for splits, layout in zip(there, layouts, strict=True):
        records = layout.record_bytes // layout.dtype.itemsize if levels.depth > 1 or levels.deduplicated else None
        steps.append((splits, torch.zeros(sum(splits.sends), records or layout.width).to(world.device, layout.dtype)))
    for splits, layout in zip(back[::-1], layouts[::-1], strict=True):
        steps.append((splits, torch.zeros(sum(splits.sends), layout.width).to(world.device, layout.dtype)))

    def run() -> None:
        for splits, rows in steps:
            transport(rows, splits, dist.group.WORLD, False)[1].wait()

    return run
