"""How many rows each rank sends to each, known to the host without stopping the device.

On CUDA the counts travel on a stream of their own while the compute stream goes on; the host waits for them only
when it has given the device enough to do. Elsewhere the exchange blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import SplitPlan
from torch.profiler import record_function

from .expert import Choice, exchange_counts


def start_plan(moe: Any, choice: Choice, layer: int, passes: str, side: Any) -> Callable[[], SplitPlan]:
    """Start exchanging the counts of ``choice``; the result waits for the plan.

    Args:
        side: the CUDA stream to use; ``None`` exchanges at once.
    """
    with record_function(f"fcsd::plan.{passes}.L{layer}"):
        if side is None or moe.ep_size == 1:
            plan = exchange_counts(moe, choice)
            return lambda: plan
        return _start_on(side, moe, choice)


def _start_on(side: torch.cuda.Stream, moe: Any, choice: Choice) -> Callable[[], SplitPlan]:
    side.wait_stream(torch.cuda.current_stream())
    choice.counts.record_stream(side)
    with torch.cuda.stream(side):
        sent = choice.counts.view(moe.ep_size, moe.num_local_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=moe.ep_group)
        totals = torch.stack((sent.sum(dim=1), received.sum(dim=1)))
        on_host = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
        on_host.copy_(totals, non_blocking=True)
        done = side.record_event()

    def wait() -> SplitPlan:
        compute = torch.cuda.current_stream()
        compute.wait_event(done)
        received.record_stream(compute)
        done.synchronize()
        sends, receives = on_host.tolist()
        return SplitPlan(sends, receives, received)

    return wait
