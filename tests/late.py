"""Collectives whose results show only once they are awaited, so that a missing wait is seen."""

import random
import time
from contextlib import contextmanager
from functools import partial

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


class _LateResult:
    """A result that appears only when it is awaited. Until then its tensor holds NaN."""

    def __init__(self, tensor, result, work):
        self.tensor, self.result, self.work = tensor, result, work
        tensor.detach().fill_(float("nan"))

    def wait(self):
        self.work.wait()
        self.tensor.detach().copy_(self.result)


@contextmanager
def late_sums():
    """Every sum, gather and scatter of rows that does not block is a late one."""
    real = dist.all_reduce, dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def sum_(tensor, *args, group=None, async_op=False):
        if not async_op:
            return real[0](tensor, *args, group=group)
        summed = tensor.clone()
        return _LateResult(tensor, summed, real[0](summed, group=group, async_op=True))

    def of_rows(send, out, x, group=None, async_op=False):
        if not async_op:
            return send(out, x, group=group)
        result = torch.empty_like(out)
        return _LateResult(out, result, send(result, x.detach().clone(), group=group, async_op=True))

    dist.all_reduce = sum_
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = (partial(of_rows, send) for send in real[1:])
    try:
        yield
    finally:
        dist.all_reduce, dist.all_gather_into_tensor, dist.reduce_scatter_tensor = real


@contextmanager
def sums_at_once():
    """Every sum is awaited where it starts, so that nothing overlaps it."""
    real = dist.all_reduce

    def sum_(*args, async_op=False, **kwargs):
        work = real(*args, async_op=True, **kwargs)
        work.wait()
        return work if async_op else None

    dist.all_reduce = sum_
    try:
        yield
    finally:
        dist.all_reduce = real
