"""Runs a quantised all-reduce (FlashCommunication V2, section 4) over torch.distributed, by NCCL or gloo.

Two ranks need one step. Each encodes all its rows and sends them to the other, by an all-gather. One kernel decodes
what both have encoded and adds it. More ranks take the two steps of the paper. Each sends every rank a share of its
encoded rows (all-to-all), adds the shares that arrive, encodes their sum and sends it to all (all-gather).

If the encoded rows of a rank take B bytes, each of N ranks sends (N - 1) B in one step and 2 (N - 1) B / N in two. For
two ranks both are B. One step rounds values once and not twice, and starts two kernels and one collective instead of
three and two.

Every value is decoded from what is sent, that of the rank itself too, and sums are added in fp32 in the order of ranks.
All ranks therefore end with the same bits.

Records are encoded at the place from which they are sent, where those of the other ranks arrive as well. On GPUs all of
it runs on a stream of its own, one all-reduce after the other. The records are made on this stream, so torch may give
their memory to the next all-reduce, and to nothing that runs beside it. This holds in a CUDA graph, too.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.moves import decode_ranks, encode_sum
from fcsd.parallel.transports.transport import OnStream, Work


def all_reduce(x: Tensor, format: Format, group: Any) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    Args:
        x: bf16 or fp32 ``[..., width]``, contiguous and of the same shape on all ranks. Nothing else may use it until
            the returned work was awaited.

    Returns:
        The collective in flight. On GPUs it needs nothing more from the host, and can be captured in a CUDA graph. On
        CPUs, only its first collective has been started, and ``wait`` does the rest. Ranks must start and await their
        all-reduces in the same order.

    Raises:
        ConfigError: the groups of the format do not divide the rows.
    """
    rows = x.detach().view(-1, x.shape[-1])
    format.row_bytes(rows.shape[1])  # refuses groups that do not divide the row, before anything is sent
    start = _OneStep if is_one_step(group) else _TwoSteps
    if x.is_cuda:
        return OnStream(_stream(x.device), rows, lambda: start(rows, format, group).wait())
    return start(rows, format, group)


def is_one_step(group: Any) -> bool:
    """Whether the ranks of a group send all their rows to each other: with two ranks this is no more than a share."""
    return dist.get_world_size(group) <= 2


def cut(rows: Tensor, format: Format, ranks: int) -> Tensor:
    """Cut rows ``[n, width]`` into equal pieces, so that ranks divide their number, if groups allow: ``[m, piece]``.

    A single row of a decoding step is cut, for example. Groups are encoded independently of each other, so this changes
    no bit of the sum.
    """
    pieces = ranks // math.gcd(len(rows), ranks)
    if rows.shape[1] // format.group % pieces:
        return rows
    return rows.view(-1, rows.shape[1] // pieces)


class _OneStep:
    """An all-reduce in one step, of which the collective is started.

    Args:
        rows: what is summed, ``[n, width]``; after ``wait`` they are the sum.
    """

    def __init__(self, rows: Tensor, format: Format, group: Any) -> None:
        self._rows, self._format = rows, format
        self._records = _records(rows, format, dist.get_world_size(group), len(rows))
        own = encode(rows, format, out=self._records[dist.get_rank(group)])
        self._work = _all_gather(self._records, own, group, async_op=not rows.is_cuda)

    def wait(self) -> None:
        """See ``Work``."""
        if self._work is not None:
            self._work.wait()
        decode_ranks(self._records, self._format, self._rows)


class _TwoSteps:
    """An all-reduce in two steps, of which the first collective is started; see ``_OneStep``."""

    def __init__(self, rows: Tensor, format: Format, group: Any) -> None:
        self._group, self._format, ranks = group, format, dist.get_world_size(group)
        self._rows = cut(rows, format, ranks)
        share = -(-len(self._rows) // ranks)
        self._records = _records(self._rows, format, ranks, share)  # those of this rank, by their receivers
        self._arriving = torch.empty_like(self._records)  # those of this rank's share of the rows, from every rank
        every = self._records.flatten(0, 1)
        encode(self._rows, format, out=every[: len(self._rows)])
        if len(every) > len(self._rows):  # a share is not full
            every[len(self._rows) :].zero_()
        self._work: Any = dist.all_to_all_single(self._arriving, self._records, group=group, async_op=not rows.is_cuda)

    def wait(self) -> None:
        """See ``Work``."""
        if self._work is not None:
            self._work.wait()
        rows, own = self._rows, self._records[dist.get_rank(self._group)]
        encode_sum(self._arriving, self._format, rows.shape[1], own)
        _all_gather(self._records, own, self._group, async_op=False)
        records = self._records.flatten(0, 1)[: len(rows)]
        decode(records, self._format, rows.shape[1], rows.dtype, rows)


def _records(rows: Tensor, format: Format, ranks: int, count: int) -> Tensor:
    """Memory for ``count`` records of each rank, uint8 ``[ranks, count, row_bytes]``."""
    return rows.new_empty(ranks, count, format.row_bytes(rows.shape[1]), dtype=torch.uint8)


def _all_gather(records: Tensor, own: Tensor, group: Any, async_op: bool) -> Any:
    """Receive the records of all ranks. Those of this rank are there already, so NCCL does not copy them."""
    return dist.all_gather_into_tensor(records.flatten(0, 1), own, group=group, async_op=async_op)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this device's all-reduces, made when the first one starts.

    Its high priority lets their blocks start before those of the computation that covers them.
    """
    return torch.cuda.Stream(device, priority=-1)
