"""Runs a quantised all-reduce (FlashCommunication V2, section 4): in one kernel, or in steps over torch.distributed.

Between GPUs of one host that can access each other's memory, one kernel pipelines encoding, wire and sum
(``symmetric.all_reduce_quantised``). Elsewhere, and by nodes or in chunks, NCCL or gloo sends the records:

    whole   two steps among all ranks: all-to-all of shares, all-gather of sums
    nodes   three steps: all-to-all inside each node, all-gather between nodes, all-gather inside each node

With several chunks the steps of one chunk run while the records of another are on the wire. Each collective sends one
tensor of records. On GPUs the whole all-reduce runs on a stream of its own. All ways give the same bits.
"""

from collections import deque
from collections.abc import Generator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import symmetric
from fcsd.parallel.all_reduce.steps import Message, cut, hierarchical, split, two_step
from fcsd.parallel.all_reduce.window import OnStream, try_window
from fcsd.parallel.transports.transport import Work


class Topology(NamedTuple):
    """The process groups of an all-reduce.

    Attributes:
        whole: all ranks.
        near: the ranks of this rank's node; None for an all-reduce in two steps among all ranks.
        far: the ranks with the same place in every node.
        chunks: the number of chunks in which the rows are pipelined.
        steps: whether torch.distributed makes every step, although one kernel could make all of them.
    """

    whole: Any
    near: Any = None
    far: Any = None
    chunks: int = 1
    steps: bool = False

    @property
    def in_one_kernel(self) -> bool:
        """Whether one kernel makes the all-reduce if the GPUs can access each other's memory."""
        return not self.steps and self.near is None and self.chunks == 1


def nodes_of(group: Any, node_size: int, chunks: int = 1) -> Topology:
    """Divide the ranks of a group into nodes of ``node_size`` neighbours. All ranks of the group make this call.

    Raises:
        ConfigError: the ranks cannot be divided into two or more nodes of two or more ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    if node_size < 2 or len(ranks) % node_size or len(ranks) == node_size:
        raise ConfigError(
            f"{len(ranks)} ranks cannot be divided into nodes of {node_size}",
            hint="the hierarchical all-reduce needs two nodes or more, each of two ranks or more",
        )
    own = ranks.index(dist.get_rank())
    first, place = own - own % node_size, own % node_size
    near, far = (
        dist.new_group(members, backend=dist.get_backend(group), use_local_synchronization=True)
        for members in (ranks[first : first + node_size], ranks[place::node_size])
    )
    return Topology(group, near, far, chunks)


def all_reduce(x: Tensor, format: Format, topology: Topology) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    Args:
        x: bf16 or fp32 ``[..., width]``, contiguous and of the same shape on all ranks. Nothing else may use it until
            the returned work was awaited.
        format: the format of the wire.
        topology: the ranks, and how they reduce.

    Returns:
        The collective in flight. On GPUs it needs nothing more from the host. On CPUs, only its first step has been
        started, and ``wait`` makes the other steps. Ranks must start and await their all-reduces in the same order.

    Raises:
        ConfigError: the groups of the format do not divide the rows.
    """
    if x.is_cuda and topology.in_one_kernel:
        window = try_window(topology.whole)
        if window is not None:
            format.row_bytes(x.shape[-1])  # refuses a format before anything is sent
            return symmetric.all_reduce_quantised(x.detach(), format, window, topology.whole)
    ranks = dist.get_world_size(topology.whole)
    near = None if topology.near is None else dist.get_world_size(topology.near)
    rows = cut(x.detach(), format, ranks if near is None else near)  # refuses a format before anything is sent
    if x.is_cuda:
        return OnStream(_stream(x.device), rows, lambda: _Stepwise(x, rows, format, topology).wait())
    return _Stepwise(x, rows, format, topology)


def _run(rows: Tensor, format: Format, topology: Topology) -> Generator[None, None, None]:
    """Run all steps of all chunks, which replace ``rows`` by the sum. It pauses when the first messages are sent."""
    if topology.near is None:
        ranks = dist.get_world_size(topology.whole)
        every = [two_step(part, format, ranks, out=part) for part in split(rows, ranks, topology.chunks)]
    else:
        ranks = dist.get_world_size(topology.near)
        every = [hierarchical(part, format, ranks, out=part) for part in split(rows, ranks, topology.chunks)]
    waiting = deque((steps, _send(next(steps), topology)) for steps in every)
    yield
    while waiting:
        steps, (arriving, work) = waiting.popleft()
        work.wait()
        with suppress(StopIteration):
            waiting.append((steps, _send(steps.send(arriving), topology)))


def _send(message: Message, topology: Topology) -> tuple[Tensor, Work]:
    """Start to send a message: the buffer of the records that arrive, and the work that fills it."""
    group = getattr(topology, message.scope)
    if message.kind == "all-to-all":
        arriving = torch.empty_like(message.records)
        work = dist.all_to_all_single(arriving, message.records, group=group, async_op=True)
    else:
        arriving = message.records.new_empty(dist.get_world_size(group), *message.records.shape)
        work = dist.all_gather_into_tensor(arriving.flatten(0, 1), message.records, group=group, async_op=True)
    assert work is not None
    return arriving, work


class _Stepwise:
    """An all-reduce whose first messages are sent. ``wait`` runs the other steps, after which ``x`` is the sum."""

    def __init__(self, x: Tensor, rows: Tensor, format: Format, topology: Topology) -> None:
        self._x, self._rows, self._run = x, rows, _run(rows, format, topology)
        next(self._run)

    def wait(self) -> None:
        """See ``Work``."""
        next(self._run, None)
        if self._rows.data_ptr() != self._x.data_ptr():  # rows of zeros were added
            _write(self._x, self._rows)


def _write(x: Tensor, sums: Tensor) -> None:
    """Write rows, of which the last may be padding, over ``x``."""
    with torch.no_grad():
        x.copy_(sums.reshape(-1)[: x.numel()].view_as(x))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this device's all-reduces, made when the first one starts."""
    return torch.cuda.Stream(device)
