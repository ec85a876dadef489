"""Chooses the levels of deduplication of a layer from its counted routing (HierMoE §III-C, Algorithm 1).

The paper's d is 1 for ``rank`` and 2 for ``node``; ``off`` is a third possibility here. The paper minimises the time of
one all-to-all. Here the time that overlap leaves exposed is minimised, and the kernels that deduplication adds count
(``cost.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fcsd.parallel.cost import Collective, Dedup, Links, Rows, Sent, kernel_seconds, seconds_of
from fcsd.parallel.expert.levels import Levels, all_groups, one_level, row_matrices, two_levels


def arrangements(ranks: int, node_size: int | None) -> dict[Dedup, Levels]:
    """The levels of each value of ``parallel.dedup``; ``node`` is missing without a node size.

    Raises:
        ConfigError: see ``two_levels``.
    """
    found: dict[Dedup, Levels] = {"off": Levels((ranks,), deduplicated=False), "rank": one_level(ranks)}
    return found if node_size is None else {**found, "node": two_levels(ranks, node_size)}


def node_size_for(ranks: int, per_node: int) -> int | None:
    """The node size for ``arrangements`` on a cluster with ``per_node`` GPUs in a node.

    Returns: None if ``ranks`` neighbouring ranks are not several whole nodes of several GPUs.
    """
    return per_node if 1 < per_node < ranks and ranks % per_node == 0 else None


def told(positions: Tensor, experts: int, levels: Mapping[Dedup, Levels]) -> Tensor:
    """What a rank tells the others about its tokens: ``all_groups`` of every arrangement, one after the other.

    Args:
        positions: ``[tokens, top_k]``, the positions of the experts that the rank's tokens chose.
    """
    return torch.cat([all_groups(positions, experts, one) for one in levels.values()])


def rows_by_link(everyone: Tensor, levels: Mapping[Dedup, Levels], node_size: int) -> dict[Dedup, tuple[int, int]]:
    """The rows of one dispatch over the links of a node and over those between nodes, of the rank that has the most.

    Args:
        everyone: ``[ranks, counts]``, what each rank has told.
        levels: the arrangements that ``told`` was called with.

    Returns: for each arrangement the rows inside of a node and the rows between nodes.
    """
    sizes = [sum(one.groups(level) for level in range(one.depth)) for one in levels.values()]
    parts = everyone.cpu().split(sizes, dim=1)
    return {
        dedup: busiest(row_matrices(part, one), node_size)
        for (dedup, one), part in zip(levels.items(), parts, strict=True)
    }


def busiest(matrices: Tensor, node_size: int) -> tuple[int, int]:
    """The rows inside of a node and between nodes of the rank that sends or receives the most.

    Args:
        matrices: ``[depth, senders, receivers]`` from ``row_matrices``, on the CPU.
    """
    rows = matrices.sum(dim=0)
    node = torch.arange(len(rows)) // node_size
    inside = (node[:, None] == node) & ~torch.eye(len(rows), dtype=torch.bool)
    near, far = rows * inside, rows * (node[:, None] != node)
    return tuple(int(max(part.sum(0).max(), part.sum(1).max())) for part in (near, far))  # type: ignore[return-value]


@dataclass(frozen=True)
class Option:
    """What one value of ``parallel.dedup`` costs a layer in a step, in seconds.

    Attributes:
        transfer: of one dispatch or combine on an idle machine.
        kernels: of the kernels that one dispatch or combine needs more than without deduplication.
        exposed: by which all collectives of the layer make the step longer, the kernels included.
    """

    dedup: Dedup
    transfer: float
    kernels: float
    exposed: float


def options(sent: Mapping[Dedup, Sent], rows: Rows, links: Links, covers: Sequence[float]) -> list[Option]:
    """The options of a layer, the one that exposes the least time first; of equals, the one with fewer levels.

    Args:
        sent: the bytes of one dispatch or combine, from the arrangement with the fewest levels on.
        rows: the rows of a rank, which the kernels move.
        covers: for each collective of a step the seconds of computation that can hide it; 0 where it is awaited at
            once.
    """
    found = []
    for dedup, of in sent.items():
        transfer, kernels = seconds_of(of, links, dedup), kernel_seconds(rows, links, dedup)
        exposed = sum(Collective(transfer, cover, kernels).exposed(links.hidden_cost) for cover in covers)
        found.append(Option(dedup, transfer, kernels, exposed))
    return sorted(found, key=lambda option: option.exposed)
