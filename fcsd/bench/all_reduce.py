"""Time the quantised all-reduce beside that of NCCL: FlashCommunication V2's table 9 on this machine.

    torchrun --nproc-per-node 4 -m fcsd.bench.all_reduce [--mib 256 64 1] [--formats int8 int5] [--node-size 2]
        [--chunks 4] [--out FILE]

The algorithmic bandwidth is the number of bytes of a rank's values in bf16, divided by the time. All ways to reduce are
timed in turns. Every quantised result is compared with the reference first, bit for bit. With ``--node-size``, the
ranks are also divided into nodes. The program runs over gloo on a machine without GPUs, where the times say nothing
about GPUs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcsd.bench.interleaved import Timing, timings
from fcsd.errors import FcsdError
from fcsd.kernels.bit_split import Format
from fcsd.launch.environment import snapshot
from fcsd.launch.world import join_world, leave
from fcsd.parallel.tensor.quantised import Topology, all_reduce, nodes_of
from fcsd.parallel.tensor.simulated import simulate_all_reduce

WIDTH = 4096
FORMATS = ("int8", "int6", "int5", "int4", "int3", "int2:sr")  # the columns of the paper's table 9
REPEATS = 10
CHECKED = 8  # rows that are compared with the reference


def topologies(node_size: int | None, chunks: int) -> dict[str, Topology]:
    """The ways to reduce, by their names in the table. All ranks make this call."""
    whole = Topology(dist.group.WORLD)
    ways = {"two steps": whole, "two steps, in chunks": whole._replace(chunks=chunks)}
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


def bench(
    mib: float,
    device: torch.device,
    node_size: int | None = None,
    chunks: int = 4,
    formats: Sequence[str] = FORMATS,
    repeats: int = REPEATS,
) -> dict[str, dict[str, Timing]]:
    """The milliseconds of the all-reduce of ``mib`` MiB of bf16 values a rank: ``[way][format]``. All ranks call it.

    Raises:
        FcsdError: a quantised result differs from the reference.
        ConfigError: the ranks cannot be divided into nodes of this size.
    """
    rows = max(1, int(mib * 2**20) // (2 * WIDTH))
    values = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16)
    x = values.clone()
    every: dict[tuple[str, str], Callable[[], Any]] = {("bf16", "bf16"): lambda: dist.all_reduce(x)}
    for way, topology in topologies(node_size, chunks).items():
        for text in formats:
            format = Format.parse(text)
            check(topology, format, device)
            every[way, text] = lambda f=format, t=topology: all_reduce(x, f, t).wait()
    runs = {f"{way}|{text}": run for (way, text), run in every.items()}
    timed = timings(runs, device, repeats, before=lambda: x.copy_(values))
    found: dict[str, dict[str, Timing]] = {}
    for way, text in every:
        found.setdefault(way, {})[text] = timed[f"{way}|{text}"]
    return found


def to_text(found: dict[str, dict[str, Timing]], mib: float) -> str:
    """The bandwidths of one size as lines of text, each with its ratio to bf16."""
    plain = found["bf16"]["bf16"].median
    gb = mib * 2**20 / 1e6  # bytes per millisecond -> GB/s
    ways = {way: timed for way, timed in found.items() if way != "bf16"}
    columns = next(iter(ways.values()))
    lines = [f"{f'{mib:g} MiB, GB/s (ratio)':24}{'bf16':>8}" + "".join(f"{text:>15}" for text in columns)]
    for way, timed in ways.items():
        cells = [f"{gb / one.median:.2f} ({plain / one.median:.2f}x)" for one in timed.values()]
        lines.append(f"{way:24}{gb / plain:8.2f}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=float, nargs="+", default=[64], help="MiB of bf16 values of each rank")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--node-size", type=int, help="ranks of a node")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, help="JSON file to write the figures to")
    arguments = parser.parse_args()
    world = join_world()
    found = {}
    for mib in arguments.mib:
        found[f"{mib:g} MiB"] = timed = bench(
            mib, world.device, arguments.node_size, arguments.chunks, arguments.formats, arguments.repeats
        )
        if world.rank == 0:
            print(to_text(timed, mib), file=sys.stderr, flush=True)
    if world.rank == 0 and arguments.out is not None:
        settings = {"repeats": arguments.repeats, "node_size": arguments.node_size, "chunks": arguments.chunks}
        result = {"environment": snapshot(), "world": world.size, "width": WIDTH, **settings, "ms": found}
        arguments.out.write_text(json.dumps(result, indent=1))
    leave(SystemExit(0))


if __name__ == "__main__":
    main()
