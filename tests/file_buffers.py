"""The double of symmetric memory: files that all processes map, copies and flags that take their time."""

import random
import time
from contextlib import nullcontext
from itertools import count

import torch
import torch.distributed as dist


class FileWindow:
    """See ``fcsd.parallel.transports.copies.Window``."""

    def __init__(self, group, capacity, prefix):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.buffers, self.flags = [], []
        for rank in range(self.size):
            self.buffers.append(_mapped(f"{prefix}-buffer{rank}", capacity, torch.uint8))
            self.flags.append(_mapped(f"{prefix}-flags{rank}", 2 * self.size, torch.int32))
        dist.barrier(group)

    sending = receiving = nullcontext

    def tell(self, peer, flag, number):
        time.sleep(random.random() * 2e-3)
        self.flags[peer][flag * self.size + self.rank] = number

    def hear(self, peer, flag, number):
        time.sleep(random.random() * 2e-3)
        until = time.monotonic() + 60
        while self.flags[self.rank][flag * self.size + peer] < number:
            assert time.monotonic() < until, f"rank {self.rank} never heard {flag} {number} of {peer}"
            time.sleep(1e-4)

    def work(self):
        return self

    def wait(self): ...


def _mapped(path, count, dtype):
    return torch.from_file(path, shared=True, size=max(count, 1), dtype=dtype)[:count]


def opener(folder):
    """What ``Puts`` opens windows with; every window has files of its own."""
    numbers = count()
    return lambda group, capacity: FileWindow(group, capacity, f"{folder}/{next(numbers)}")
