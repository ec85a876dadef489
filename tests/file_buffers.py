"""Peer buffers for tests, in files that all processes map. Flags are set and seen after random delays."""

import random
import time
from contextlib import nullcontext
from itertools import count

import torch
import torch.distributed as dist


class FileBuffers:
    """See ``fcsd.parallel.transports.copies.PeerBuffers``."""

    def __init__(self, group, capacity, prefix):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.buffers, self.flags = [], []
        for rank in range(self.size):
            self.buffers.append(_mapped(f"{prefix}-buffer{rank}", capacity, torch.uint8))
            self.flags.append(_mapped(f"{prefix}-flags{rank}", 2 * self.size, torch.int32))
        dist.barrier(group)

    sending = receiving = nullcontext

    def set_flag(self, peer, flag, number):
        time.sleep(random.random() * 2e-3)
        self.flags[peer][flag * self.size + self.rank] = number

    def await_flag(self, peer, flag, number):
        time.sleep(random.random() * 2e-3)
        until = time.monotonic() + 60
        while self.flags[self.rank][flag * self.size + peer] < number:
            assert time.monotonic() < until, f"rank {peer} never set flag {flag} at rank {self.rank} to {number}"
            time.sleep(1e-4)

    def work(self):
        return self

    def wait(self): ...


def _mapped(path, count, dtype):
    return torch.from_file(path, shared=True, size=max(count, 1), dtype=dtype)[:count]


def opener(folder):
    """The ``open_buffers`` argument of a ``CopiesTransport``. Each call makes new files in ``folder``."""
    numbers = count()
    return lambda group, capacity: FileBuffers(group, capacity, f"{folder}/{next(numbers)}")
