"""Time the quantised all-reduce beside that of NCCL: FlashCommunication V2's table 9 on this machine.

    torchrun --nproc-per-node 4 -m fcsd.bench.all_reduce [--mib 64] [--node-size 2] [--chunks 4] [--out FILE]

The algorithmic bandwidth is the number of bytes of a rank's values in bf16, divided by the time. Every quantised result
is compared with the reference first, bit for bit. With ``--node-size``, the ranks are also divided into nodes. The
program runs over gloo on a machine without GPUs, where the times say nothing about GPUs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.errors import FcsdError
from fcsd.kernels.bit_split import Format
from fcsd.launch.environment import snapshot
from fcsd.launch.world import barrier, join_world, leave
from fcsd.parallel.tensor.quantised import Topology, all_reduce, nodes_of
from fcsd.parallel.tensor.simulated import simulate_all_reduce

WIDTH = 4096
FORMATS = ("int8", "int6", "int5", "int4", "int3", "int2:sr")  # the columns of the paper's table 9
REPEATS = 10
CHECKED = 8  # rows that are compared with the reference


def topologies(node_size: int | None, chunks: int) -> dict[str, Topology]:
    """The ways to reduce, by their names in the table. All ranks make this call."""
    ways = {"two steps": Topology(dist.group.WORLD)}
    if node_size is not None:
        nodes = nodes_of(dist.group.WORLD, node_size)
        ways |= {"by nodes": nodes, "by nodes, in chunks": nodes._replace(chunks=chunks)}
    return ways


def check(topology: Topology, format: Format, device: torch.device) -> None:
    """Compare one quantised all-reduce with the reference.

    Raises:
        FcsdError: a bit differs.
    """
    x = torch.randn(CHECKED, WIDTH, device=device, dtype=torch.bfloat16)
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    node_size = None if topology.near is None else dist.get_world_size(topology.near)
    expected = simulate_all_reduce(torch.stack(every), format, node_size)
    all_reduce(x, format, topology).wait()
    if not torch.equal(x, expected):
        raise FcsdError(f"the all-reduce in {format} differs from its reference on rank {dist.get_rank()}")


def seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of ``run``. All ranks start together, and each run is awaited."""
    times = []
    for _ in range(repeats + 2):  # the first two are warm-ups
        barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def bench(
    mib: float,
    device: torch.device,
    node_size: int | None = None,
    chunks: int = 4,
    formats: Sequence[str] = FORMATS,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """The algorithmic bandwidths, in GB/s, of the all-reduce of ``mib`` MiB of bf16 values a rank. All ranks call it.

    Raises:
        FcsdError: a quantised result differs from the reference.
        ConfigError: the ranks cannot be divided into nodes of this size.
    """
    x: Tensor = torch.randn(int(mib * 2**20) // (2 * WIDTH), WIDTH, device=device, dtype=torch.bfloat16)
    plain = seconds(lambda: dist.all_reduce(x.zero_()), device, repeats)
    found: dict[str, Any] = {"bf16": x.nbytes / plain / 1e9}
    for name, topology in topologies(node_size, chunks).items():
        found[name] = {}
        for text in formats:
            format = Format.parse(text)
            check(topology, format, device)
            time_of_one = seconds(lambda f=format, t=topology: all_reduce(x, f, t).wait(), device, repeats)
            found[name][text] = x.nbytes / time_of_one / 1e9
    return found


def to_text(found: dict[str, Any]) -> str:
    """The bandwidths as lines of text."""
    lines = [f"{'GB/s':24}{'bf16':>8}" + "".join(f"{text:>9}" for text in found["two steps"])]
    for name, of in found.items():
        if name != "bf16":
            lines.append(f"{name:24}{found['bf16']:8.2f}" + "".join(f"{speed:9.2f}" for speed in of.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=float, default=64, help="MiB of bf16 values of each rank")
    parser.add_argument("--node-size", type=int, help="ranks of a node")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON file to write the figures to")
    arguments = parser.parse_args()
    world = join_world()
    found = bench(arguments.mib, world.device, arguments.node_size, arguments.chunks)
    if world.rank == 0:
        print(to_text(found), file=sys.stderr, flush=True)
        if arguments.out is not None:
            settings = {"mib": arguments.mib, "node_size": arguments.node_size, "chunks": arguments.chunks}
            result = {"environment": snapshot(), "world": world.size, **settings, "gb_per_s": found}
            arguments.out.write_text(json.dumps(result, indent=1))
    leave(SystemExit(0))


if __name__ == "__main__":
    main()
