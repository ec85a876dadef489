"""Predicts the time of an all-to-all from its bytes, and the part of it that overlap leaves exposed.

A transfer of n bytes takes alpha + n * beta, a latency and a time for each byte (HierMoE eq. 1). A machine has two
kinds of links: those inside of a node and those between nodes.

Under overlap, a shorter transfer saves time only where it was exposed, and the kernels that shorten it cost time on the
compute stream. ``Collective.exposed`` is the one place that weighs the two against each other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Dedup = Literal["off", "rank", "node"]


@dataclass(frozen=True)
class Line:
    """The time of a transfer as a function of its size.

    Attributes:
        alpha: seconds that a transfer of any size takes.
        beta: seconds for each byte that a rank sends.
    """

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """The seconds of a transfer of ``size`` bytes; nothing is sent in no time."""
        return self.alpha + self.beta * size if size else 0.0


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through measured ``(bytes, seconds)`` that is nearest by relative error; no coefficient is negative.

    Sizes span several orders of magnitude. The squared error of a point is therefore divided by its squared time,
    otherwise the largest sizes alone would decide.
    """
    import numpy
    from scipy.optimize import nnls

    sizes, seconds = numpy.array(points, dtype=float).T
    # The columns are brought to the same order of magnitude, because bytes and ones differ by eight.
    (alpha, beta), _ = nnls(numpy.stack([1 / seconds, sizes / sizes.max() / seconds], axis=1), numpy.ones(len(points)))
    return Line(float(alpha), float(beta / sizes.max()))


def worst_error(line: Line, points: Sequence[tuple[float, float]]) -> float:
    """The largest relative difference between the line and measured ``(bytes, seconds)``."""
    return max(abs(line.seconds(size) / seconds - 1) for size, seconds in points)


@dataclass(frozen=True)
class Links:
    """The links between the GPUs of a run.

    Attributes:
        per_node: GPUs of a node.
        near: an all-to-all inside of a node; bytes are those that a GPU sends to the others of its node.
        far: an all-to-all between the GPUs that have the same place in their nodes; bytes are those that a GPU sends to
            other nodes. None for a machine of one node.
        hidden_cost: seconds that the compute stream loses for each second of a transfer that it hides, because both
            share the memory, and NCCL also uses SMs.
        copy: bytes per second that a kernel reads and writes together.
        codec: the share of ``copy`` that the kernels which encode and decode rows reach.
        direct: an all-to-all between the GPUs of all nodes; bytes are those that a GPU sends to other nodes. None
            stands for ``far``.
        fixed: for each level of deduplication the seconds of a dispatch or combine that depend neither on its bytes nor
            on its rows: the exchange of counts, the places of rows, and the launches of kernels. 0 where none is given.
        speed: the speed of the GPUs' computation as a multiple of an H200's.
    """

    per_node: int
    near: Line
    far: Line | None
    hidden_cost: float
    copy: float
    codec: float
    direct: Line | None = None
    fixed: Mapping[Dedup, float] = field(default_factory=dict)
    speed: float = 1.0


@dataclass(frozen=True)
class Rows:
    """The rows of one dispatch or one combine of one rank, with balanced experts.

    Attributes:
        tokens: tokens of the rank.
        top_k: routed experts of a token.
        experts: routed experts of the layer.
        ranks: ranks that share the experts.
        width: values of a row, 2 bytes each in memory.
        bits: bits of a value as it is sent.
    """

    tokens: int
    top_k: int
    experts: int
    ranks: int
    width: int
    bits: float = 16.0

    @property
    def wire(self) -> float:
        """Bytes of a row as it is sent."""
        return self.width * self.bits / 8

    @property
    def exact(self) -> float:
        """Bytes of a row that is sent as it is."""
        return max(self.wire, 2.0 * self.width)


def expected_groups(experts: int, top_k: int, groups: int) -> float:
    """The mean number of different groups of experts that a token is sent to, if its experts are random.

    The groups have equal sizes and their number divides ``experts`` (HierMoE Table II counts the duplicates, which are
    ``1 - expected_groups / top_k``).
    """
    return groups * (1 - math.comb(experts - experts // groups, top_k) / math.comb(experts, top_k))


@dataclass(frozen=True)
class Sent:
    """The bytes of one dispatch or combine of the rank that has the most.

    Attributes:
        near: bytes to ranks of its own node.
        far: bytes to other nodes.
    """

    near: float
    far: float


def expected_bytes(rows: Rows, links: Links, dedup: Dedup) -> Sent:
    """The bytes of one dispatch or combine under random routing.

    - ``off`` sends a row for each token and expert, ``rank`` a row for each token and rank.
    - ``node`` sends a row for each token and node to the GPU with the same place in that node, which forwards it inside
      of the node (HierMoE §III). Rows inside of the node are sent as they are.
    """
    nodes = max(1, rows.ranks // links.per_node)
    each = expected_groups(rows.experts, rows.top_k, rows.ranks) if dedup != "off" else rows.top_k
    if dedup == "node" and nodes > 1:
        sent = rows.tokens * expected_groups(rows.experts, rows.top_k, nodes)
        forwarded = rows.tokens * each * (links.per_node - 1) / links.per_node
        return Sent(forwarded * rows.exact, sent * (nodes - 1) / nodes * rows.wire)
    to_each = rows.tokens * each / rows.ranks * rows.wire
    neighbours = min(rows.ranks, links.per_node) - 1
    return Sent(to_each * neighbours, to_each * (rows.ranks - neighbours - 1))


def seconds_of(sent: Sent, links: Links, dedup: Dedup) -> float:
    """Seconds of one dispatch or combine on an idle machine.

    Links inside of a node and between nodes are busy at the same time, except under ``node``, where the transfers
    follow each other.
    """
    inside = links.near.seconds(sent.near)
    if not sent.far:
        return inside
    assert links.far is not None, "rows between nodes need a link between nodes"
    if dedup == "node":
        return inside + links.far.seconds(sent.far)
    return max(inside, (links.direct or links.far).seconds(sent.far))


def transfer_seconds(rows: Rows, links: Links, dedup: Dedup) -> float:
    """Seconds of one dispatch or combine on an idle machine under random routing."""
    return seconds_of(expected_bytes(rows, links, dedup), links, dedup)


def kernel_seconds(rows: Rows, links: Links, dedup: Dedup) -> float:
    """Seconds of the kernels that one dispatch or combine needs more than a plain one, on the compute stream.

    To them belongs what ``links.fixed`` counts more for this level of deduplication than for none. Records are written
    and read once in place of rows. Deduplication reads and writes each row once more, to copy a token's row to its
    experts or to sum their outputs.
    """
    count = rows.tokens * rows.top_k
    seconds = max(0.0, links.fixed.get(dedup, 0.0) - links.fixed.get("off", 0.0))
    if rows.bits < 16:
        seconds += 2 * count * (2 * rows.width + rows.wire) / (links.copy * links.codec)
    if dedup != "off":
        seconds += count * 4 * rows.width / links.copy
    return seconds


@dataclass(frozen=True)
class Collective:
    """One dispatch or combine, forward or backward.

    Attributes:
        transfer: seconds on an idle machine.
        cover: seconds of the computation between launch and await; 0 if the rank waits for it at once.
        kernels: seconds of additional kernels on the compute stream.
    """

    transfer: float
    cover: float
    kernels: float = 0.0

    def exposed(self, hidden_cost: float) -> float:
        """Seconds by which the step is longer than without the collective (FarSkip eq. 9 has the first term alone)."""
        hidden = min(self.transfer, self.cover)
        return self.transfer - hidden + hidden_cost * hidden + self.kernels
