"""Sends rows between the nodes of a group, beside a transport that copies rows inside each node."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcsd.parallel.transports.transport import Splits, Work


@dataclass(frozen=True)
class Node:
    """The ranks of one node.

    Attributes:
        group: their process group.
        ranks: their ranks in the whole group, in the same order.
    """

    group: Any
    ranks: Sequence[int]


def node_of(group: Any, size: int) -> Node:
    """The node of this process, where ``size`` neighbouring ranks of ``group`` form a node. All ranks call it."""
    first = dist.get_rank(group) // size * size
    ranks = range(first, first + size)
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    return Node(dist.new_group(members, use_local_synchronization=True), ranks)


def send_outside(rows: Tensor, received: Tensor, splits: Splits, node: Node, group: Any) -> Sequence[Work]:
    """Start to send the rows that leave the node, and to receive those that come from other nodes.

    Args:
        rows: ``[sent, width]``, in the order of the receivers.
        received: ``[received, width]``, in the order of the senders. Rows from this node are not written to.
        splits: the sizes of the whole exchange.
        group: the group of all ranks.
    """
    sends, receives = spans(splits.sends), spans(splits.receives)
    operations = []
    for rank in range(dist.get_world_size(group)):
        if rank in node.ranks:
            continue
        peer = dist.get_global_rank(group, rank)
        if splits.receives[rank]:
            operations.append(dist.P2POp(dist.irecv, received[receives[rank]], peer, group))
        if splits.sends[rank]:
            operations.append(dist.P2POp(dist.isend, rows[sends[rank]], peer, group))
    return dist.batch_isend_irecv(operations) if operations else []


def spans(counts: list[int], row: int = 1) -> list[slice]:
    """Where the rows of each rank are, if those of all ranks are in order and a row takes ``row`` places."""
    return [slice(*ends) for ends in pairwise(accumulate((count * row for count in counts), initial=0))]
