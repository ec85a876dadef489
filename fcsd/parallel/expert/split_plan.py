"""How many rows each rank sends to each, known to the host without stopping the device.

On CUDA the counts travel on a stream of their own while the compute stream goes on; the host waits for them only
when it has given the device enough to do. Elsewhere the exchange blocks. Every rank learns every count: where its
rows land at the others, and whether any rank receives more than a buffer holds, follows without asking again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fcsd.parallel.expert.block import Choice
from fcsd.parallel.transports.transport import Route, route


class Plan(NamedTuple):
    """The routes of one layer's rows in one pass."""

    dispatch: Route
    combine: Route
    counts: Tensor  # [ranks, local experts]: rows that come from each rank for each expert of this one


def start_plan(moe: Any, choice: Choice, layer: int, passes: str, side: Any) -> Callable[[], Plan]:
    """Start exchanging the counts of ``choice``; the result waits for the plan.

    Args:
        side: the CUDA stream to use; ``None`` exchanges at once.
    """
    with record_function(f"fcsd::plan.{passes}.L{layer}"):
        if side is not None:
            return _start_on(side, moe, choice)
        everyone = _gather(moe, choice.counts)
        plan = _plan(moe, everyone, everyone.sum(dim=2).tolist())
        return lambda: plan


def _start_on(side: torch.cuda.Stream, moe: Any, choice: Choice) -> Callable[[], Plan]:
    side.wait_stream(torch.cuda.current_stream())
    choice.counts.record_stream(side)
    with torch.cuda.stream(side):
        everyone = _gather(moe, choice.counts)
        totals = everyone.sum(dim=2)
        on_host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
        on_host.copy_(totals, non_blocking=True)
        done = side.record_event()

    def wait() -> Plan:
        compute = torch.cuda.current_stream()
        compute.wait_event(done)
        everyone.record_stream(compute)
        done.synchronize()
        return _plan(moe, everyone, on_host.tolist())

    return wait


def _gather(moe: Any, counts: Tensor) -> Tensor:
    """``[experts] -> [senders, receivers, local experts]``."""
    if moe.ep_size == 1:
        return counts.view(1, 1, -1)
    everyone = counts.new_empty(moe.ep_size * counts.numel())
    dist.all_gather_into_tensor(everyone, counts, group=moe.ep_group)
    return everyone.view(moe.ep_size, moe.ep_size, moe.num_local_experts)


def _plan(moe: Any, everyone: Tensor, matrix: list[list[int]]) -> Plan:
    transposed = [list(column) for column in zip(*matrix, strict=True)]
    return Plan(route(matrix, moe.ep_rank), route(transposed, moe.ep_rank), everyone[:, moe.ep_rank])
