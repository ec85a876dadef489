"""Tells the host how many rows each rank sends to each other rank, without stopping the device.

On CUDA the ranks exchange their counts on a separate stream while the compute stream goes on. The host waits for the
counts only after it has launched enough work. On other devices the exchange blocks.

Every rank gets the counts of every rank. Without another exchange it therefore knows where its rows begin in the
buffers of the other ranks, and whether any rank receives more rows than a buffer holds.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(
    counts: Tensor, summarise: Callable[[Tensor], Tensor], group: Any, ranks: int, side: torch.cuda.Stream | None
) -> Callable[[], tuple[Tensor, Any]]:
    """Start to gather ``counts [n]`` of all ranks.

    Args:
        summarise: a function from the counts of all ranks ``[ranks, n]`` to the integers that the host needs, as a
            tensor on the same device.
        ranks: the size of ``group``.
        side: the CUDA stream for the exchange; None gathers at once and blocks.

    Returns: what waits for the counts of all ranks, ``[ranks, n]``, and the summary on the host, nested lists.
    """
    everyone = counts.new_empty(ranks, counts.numel())
    if side is None:
        dist.all_gather_into_tensor(everyone.view(-1), counts, group=group)
        gathered = everyone, summarise(everyone).tolist()
        return lambda: gathered
    # The memory of ``counts`` and ``everyone`` belongs to the compute stream. Both live until that stream has waited
    # for this one, so the allocator need not be told, which would query an event at every allocation.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_gather_into_tensor(everyone.view(-1), counts, group=group)
        summary = summarise(everyone)
        on_host = torch.empty(summary.shape, dtype=summary.dtype, pin_memory=True)
        on_host.copy_(summary, non_blocking=True)
        done = side.record_event()

    used = counts, everyone  # ``wait`` keeps both

    def wait() -> tuple[Tensor, Any]:
        torch.cuda.current_stream().wait_event(done)
        done.synchronize()
        return used[1], on_host.tolist()

    return wait
