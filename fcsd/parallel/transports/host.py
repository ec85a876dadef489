"""An all-to-all through memory of the host, between GPUs of one host that cannot copy into each other's memory.

Copy engines bring the rows up and down, in pieces, so the SMs stay with the computation beside them. The rows that a
rank keeps are copied on another stream meanwhile. Every call makes a new buffer.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.parallel.transports.transport import Several, Splits, Work

# Starts work behind what is on the current stream, and beside what comes after it there.
Beside = Callable[[Callable[[], object]], Work]


class HostRows(Protocol):
    """The memory of the host that the ranks of a group share; see ``parallel.all_reduce.host.HostSums``."""

    def all_to_all_uneven(
        self, rows: Tensor, out: Tensor, sends: Sequence[int], receives: Sequence[int], most: int
    ) -> None:
        """Send ``sends[r]`` bytes of ``rows`` to each rank r but this one, and receive ``receives[r]`` in ``out``."""
        ...


class HostTransport:
    """The ``Transport`` through memory of the host.

    Args:
        open_rows: the memory of a group. All ranks make the first call for a group together.
        beside: how to start the rows that travel, and those that stay; see ``streams``.
    """

    def __init__(self, open_rows: Callable[[Any], HostRows], beside: tuple[Beside, Beside]) -> None:
        self._open, self._beside = open_rows, beside

    def __call__(self, rows: Tensor, splits: Splits, group: Any, keep: bool) -> tuple[Tensor, Work]:
        """See ``transport.Transport``.

        Raises:
            PeerLostError: a rank has ended.
        """
        del keep  # every call makes a new buffer
        shared, me, row = self._open(group), dist.get_rank(group), rows.shape[1] * rows.element_size()
        received = rows.new_empty(sum(splits.receives), rows.shape[1])
        sends, receives = ([count * row for count in counts] for counts in (splits.sends, splits.receives))
        travel, stay = self._beside
        away = travel(lambda: shared.all_to_all_uneven(rows, received, sends, receives, splits.between * row))
        own, place = rows.split(splits.sends)[me], received.split(splits.receives)[me]
        return received, Several([away, stay(lambda: place.copy_(own))])


@cache
def streams() -> tuple[Beside, Beside]:
    """Two streams of the current CUDA device, for the rows that travel and for those that stay.

    Raises:
        ConfigError: there are no GPUs.
    """
    if not torch.cuda.is_available():
        raise ConfigError("rows through the host are for GPUs", "Set parallel.transport: auto, which is gloo on CPUs.")
    return partial(_on, torch.cuda.Stream(priority=-1)), partial(_on, torch.cuda.Stream(priority=-1))


def _on(stream: torch.cuda.Stream, run: Callable[[], object]) -> Work:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        return stream.record_event()
