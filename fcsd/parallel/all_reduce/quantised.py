"""Runs a quantised all-reduce (FlashCommunication V2, section 4) in two steps over torch.distributed.

NCCL or gloo sends the records: an all-to-all of shares, and an all-gather of sums. On GPUs both steps run on a stream
of their own.

Every value is decoded from what is sent, that of the rank itself too, and sums are added in fp32 in the order of ranks.
All ranks therefore end with the same bits.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.moves import encode_sum
from fcsd.parallel.all_reduce.window import OnStream
from fcsd.parallel.transports.transport import Work


def all_reduce(x: Tensor, format: Format, group: Any) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    Args:
        x: bf16 or fp32 ``[..., width]``, contiguous and of the same shape on all ranks. Nothing else may use it until
            the returned work was awaited.
        format: the format of the values sent.
        group: the ranks.

    Returns:
        The collective in flight. On GPUs it needs nothing more from the host. On CPUs, only its first step has been
        started, and ``wait`` makes the second one. Ranks must start and await their all-reduces in the same order.

    Raises:
        ConfigError: the groups of the format do not divide the rows.
    """
    rows = cut(x.detach(), format, dist.get_world_size(group))  # refuses a format before anything is sent
    if x.is_cuda:
        return OnStream(_stream(x.device), rows, lambda: _Stepwise(x, rows, format, group).wait())
    return _Stepwise(x, rows, format, group)


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


class _Stepwise:
    """An all-reduce whose first step is started. ``wait`` makes the second one, after which ``x`` is the sum.

    Args:
        x: what is summed.
        rows: what ``cut`` has made of it; the ranks divide their number.
        format: the format of the values sent.
        group: the ranks.
    """

    def __init__(self, x: Tensor, rows: Tensor, format: Format, group: Any) -> None:
        self._x, self._rows, self._format, self._group = x, rows, format, group
        records = encode(rows, format)
        self._arriving = torch.empty_like(records)  # the records of this rank's share of the rows, from every rank
        self._work: Any = dist.all_to_all_single(self._arriving, records, group=group, async_op=True)

    def wait(self) -> None:
        """See ``Work``."""
        self._work.wait()
        rows, ranks = self._rows, dist.get_world_size(self._group)
        arrived = self._arriving.unflatten(0, (ranks, len(rows) // ranks))
        sums = encode_sum(arrived, self._format, rows.shape[1])
        gathered = torch.empty_like(self._arriving)
        dist.all_gather_into_tensor(gathered, sums, group=self._group)
        decode(gathered, self._format, rows.shape[1], rows.dtype, rows)
        if rows.data_ptr() != self._x.data_ptr():  # rows of zeros were added
            with torch.no_grad():
                self._x.copy_(rows.reshape(-1)[: self._x.numel()].view_as(self._x))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this device's all-reduces, made when the first one starts."""
    return torch.cuda.Stream(device)
