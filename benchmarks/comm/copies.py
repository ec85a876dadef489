"""Times copies between GPUs and memory of the host, by GPUs alone and beside each other: what their links share.

    python benchmarks/comm/copies.py OUT.json [--mib 256]

Each GPU has its own pinned memory, of ``--mib`` for each way, and copies all of it again and again, to the GPU, from
it, or both at once. With few MiB the processor's caches may hold what is copied; many have to go through the memory.
OUT.json has under ``GB/s`` those of each GPU, by the numbers of those that copy at once.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from benchmarks.out_file import out_file
from torch import Tensor

from fcsd.bench.runner import write
from fcsd.launch.environment import snapshot

_BYTES = 2 << 30  # that a GPU copies each way, in what is timed


class Buffers(NamedTuple):
    """What one GPU copies to itself and from itself, and a stream for each."""

    from_host: Tensor
    to_host: Tensor
    arrives: Tensor
    leaves: Tensor
    up: torch.cuda.Stream
    down: torch.cuda.Stream


def buffers(gpu: int, size: int) -> Buffers:
    """Those of a GPU, of ``size`` bytes each."""
    hosts = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    devices = (torch.empty(size, dtype=torch.uint8, device=gpu) for _ in range(2))
    return Buffers(*hosts, *devices, torch.cuda.Stream(gpu), torch.cuda.Stream(gpu))


def speed(of: Sequence[Buffers], up: bool, down: bool) -> float:
    """GB/s of each of these GPUs, each way."""
    size = of[0].arrives.numel()
    repeats = max(1, _BYTES // size)

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            for one in of:
                if up:
                    with torch.cuda.stream(one.up):
                        one.arrives.copy_(one.from_host, non_blocking=True)
                if down:
                    with torch.cuda.stream(one.down):
                        one.to_host.copy_(one.leaves, non_blocking=True)
        for one in of:
            one.up.synchronize()
            one.down.synchronize()
        return time.perf_counter() - begin

    run(1)
    return round(size * repeats / run(repeats) / 1e9, 1)


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=out_file)
    parser.add_argument("--mib", type=int, default=256, help="of memory that each GPU reads, and writes")
    given = parser.parse_args()
    every = [buffers(gpu, given.mib << 20) for gpu in range(torch.cuda.device_count())]
    found: dict[str, dict[str, float]] = {}
    for count in range(1, len(every) + 1):
        for gpus in itertools.combinations(range(len(every)), count):
            of = [every[gpu] for gpu in gpus]
            found[str(gpus)] = {
                "up": speed(of, True, False),
                "down": speed(of, False, True),
                "both": speed(of, True, True),
            }
            print(gpus, found[str(gpus)], flush=True)
    write({"command": " ".join(sys.argv), "environment": snapshot(), "GB/s": found}, given.out)


if __name__ == "__main__":
    main()
