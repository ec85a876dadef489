"""Collectives whose results show only once they are awaited, so that a missing wait is seen."""

import random
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist


class _LateWork:
    """The work of a collective. Until it is awaited, the receive buffer holds NaN."""

    def __init__(self, work, arrived, received, sent):
        self.work, self.arrived, self.received, self.sent = work, arrived, received, sent
        self.copy = sent.clone()

    def wait(self):
        time.sleep(random.random() * 5e-4)
        self.work.wait()
        # Bytes are compared, because the tails of records may look like NaN.
        unchanged = torch.equal(self.sent.view(torch.uint8), self.copy.view(torch.uint8))
        assert unchanged, "rows were overwritten while they were sent"
        self.received.copy_(self.arrived)


@contextmanager
def late_collectives():
    """Every all-to-all that does not block is a late one."""
    real = dist.all_to_all_single

    def late(*args, async_op=False, **kwargs):
        if not async_op:
            return real(*args, **kwargs)
        received, sent, *sizes = args
        arrived = torch.empty_like(received)
        received.fill_(float("nan") if received.is_floating_point() else 255)  # 255 in all bytes is NaN in bf16
        return _LateWork(real(arrived, sent, *sizes, async_op=True, **kwargs), arrived, received, sent)

    dist.all_to_all_single = late
    try:
        yield
    finally:
        dist.all_to_all_single = real
