"""The steps of a quantised all-reduce on one rank: what it sends, and what it computes from what it receives.

Source: FlashCommunication V2, section 4. An algorithm is a generator. It yields a ``Message``, the records that this
rank sends, and is resumed with the records that arrive. At the end it returns the sum. It knows nothing of how records
travel: ``quantised`` sends them by torch.distributed, and a test routes them between ranks in one process.

Every value is decoded from what is sent, that of the rank itself too, and sums are added in fp32 in the order of ranks.
All ranks therefore end with the same bits.
"""

import math
from collections.abc import Generator
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.moves import encode_sum

# The ranks among which a message travels: all of them, those of one node, or those with the same place in every node.
Scope = Literal["whole", "near", "far"]


class Message(NamedTuple):
    """The records that a rank sends in one step.

    Attributes:
        kind: ``all-to-all`` sends each rank its share, and ``all-gather`` sends the same records to all ranks.
        scope: the ranks that take part.
        records: uint8, ``[ranks, n, row_bytes]`` for an all-to-all and ``[n, row_bytes]`` for an all-gather. The
            records that arrive are ``[ranks, n, row_bytes]`` in both cases, in the order of ranks.
    """

    kind: Literal["all-to-all", "all-gather"]
    scope: Scope
    records: Tensor


# It yields messages, is sent the records that arrive, and returns the sum, [n, width] of the dtype of the rows.
Steps = Generator[Message, Tensor, Tensor]


def two_step(rows: Tensor, format: Format, ranks: int, out: Tensor | None = None) -> Steps:
    """Sum rows over ``ranks`` in two steps: each rank sums its share of the rows, and all ranks gather the sums.

    Args:
        rows: this rank's rows ``[n, width]``; ``ranks`` divides ``n``.
        format: the format of the wire in both steps.
        ranks: the number of ranks.
        out: where the sum is written, contiguous and of the shape of the rows; it may be the rows. None makes a tensor.
    """
    width = rows.shape[1]
    arrived = yield Message("all-to-all", "whole", _shares(rows, format, ranks))
    gathered = yield Message("all-gather", "whole", encode_sum(arrived, format, width))
    return decode(gathered.flatten(0, 1), format, width, rows.dtype, out)


def hierarchical(rows: Tensor, format: Format, node_size: int, out: Tensor | None = None) -> Steps:
    """Sum rows inside each node, then across the nodes, and gather the sums inside each node.

    A rank sums its share of the rows of its node. It exchanges this sum with the ranks that have the same place in the
    other nodes. With two nodes, every value crosses the bridge between them once in each direction.

    Args:
        rows: this rank's rows ``[n, width]``; ``node_size`` divides ``n``.
        format: the format of the wire in all three steps.
        node_size: the number of ranks in each node.
        out: as in ``two_step``.
    """
    width = rows.shape[1]
    arrived = yield Message("all-to-all", "near", _shares(rows, format, node_size))
    of_nodes = yield Message("all-gather", "far", encode_sum(arrived, format, width))
    gathered = yield Message("all-gather", "near", encode_sum(of_nodes, format, width))
    return decode(gathered.flatten(0, 1), format, width, rows.dtype, out)


def cut(x: Tensor, format: Format, ranks: int) -> Tensor:
    """Cut a tensor into rows that can be divided among ranks evenly: ``[..., width] -> [n, piece]``.

    The rows of the tensor are cut into equal pieces if their number is not a multiple of ``ranks``, as the single row
    of a decoding step is. If the pieces would not hold whole groups, rows of zeros are added instead. Groups are
    encoded independently of each other, so this changes no bit of the sum.

    Raises:
        ConfigError: the groups of the format do not divide the rows of ``x``.
    """
    rows = x.reshape(-1, x.shape[-1])
    format.row_bytes(rows.shape[1])  # refuses groups that do not divide the row
    pieces = ranks // math.gcd(len(rows), ranks)
    if rows.shape[1] // format.group % pieces == 0:
        return rows.view(-1, rows.shape[1] // pieces)
    return F.pad(rows, (0, 0, 0, -len(rows) % ranks))


def split(rows: Tensor, ranks: int, chunks: int) -> list[Tensor]:
    """At most ``chunks`` parts of rows ``[n, width]``, each of which ``ranks`` divides, as it divides ``n``."""
    share = len(rows) // ranks
    return list(rows.split(ranks * math.ceil(share / chunks))) if share else []


def _shares(rows: Tensor, format: Format, ranks: int) -> Tensor:
    """The records of each rank's share of the rows: ``[ranks, n / ranks, row_bytes]``."""
    records = encode(rows, format)
    return records.view(ranks, len(rows) // ranks, records.shape[1])
