"""Measures the links of a cluster: all-to-alls inside of a node and between nodes, and all-reduces inside of a node.

All-to-alls are measured over several sizes while all GPUs send at once, as they do in training, and told as the lines
through their times. All-reduces are measured as a server has them: by 2, 4, 8, ... GPUs of one node while the others
rest. The result is a machine file (``fcsd.parallel.machine``).
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcsd.bench.runner import together
from fcsd.bench.serve.host_ways import microseconds
from fcsd.disk import write_text
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world
from fcsd.parallel.machine import Line, Link, Machine
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.symmetric_memory import open_buffers
from fcsd.parallel.transports.transport import Splits, Transport, all_to_all, splits_of

WIDTH = 2048  # values of a row; 4096 bytes in bf16
# Rows that a process sends: 128 KiB to 512 MiB by GPUs, up to 8 MiB by CPUs, which are much slower.
SIZES = {"cuda": tuple(2**power for power in range(5, 18, 2)), "cpu": tuple(2**power for power in range(5, 12, 2))}
SUMS = {"cuda": tuple(2**power for power in range(13, 27)), "cpu": tuple(2**power for power in range(13, 21))}  # bytes
REPEATS = 7


def groups_of(world: int, node_size: int) -> dict[str, list[list[int]]]:
    """The groups of ranks of each link: ``near`` for nodes, ``far`` for the ranks with the same place in their nodes.

    Raises:
        ConfigError: ``node_size`` does not divide the ranks, or there is only one rank.
    """
    if world == 1:
        raise ConfigError("one GPU has no link to measure", hint="--gpus 2 or more")
    if world % node_size:
        raise ConfigError(f"--node-size {node_size} does not divide {world} GPUs", hint="choose a size that does")
    nodes = [list(range(first, first + node_size)) for first in range(0, world, node_size)]
    places = [list(ranks) for ranks in zip(*nodes, strict=True)]
    return {"near": nodes if node_size > 1 else [], "far": places if len(nodes) > 1 else []}


def bench(node_size: int) -> Machine:
    """Measures every link that the ranks have; every rank calls this. Ways through the host are those that are kept.

    Args:
        node_size: GPUs of a node. A smaller number than that of a real node imitates several nodes on one host.

    Returns: the machine, whose ``measured`` holds all points.

    Raises:
        ConfigError: as in ``groups_of``.
    """
    world = join_world()
    sizes = SIZES[world.device.type]
    found: dict[str, Any] = {}
    lines: dict[str, Line] = {}
    for link, groups in groups_of(world.size, node_size).items():
        if not groups:
            continue
        joined = {tuple(ranks): dist.new_group(ranks) for ranks in groups}  # every rank makes every group
        ranks, group = next((ranks, group) for ranks, group in joined.items() if world.rank in ranks)
        times = {name: _points(transport, ranks, group, world, sizes) for name, transport in _transports(link, world)}
        fitted = {name: fit(points) for name, points in times.items()}
        best = min(fitted, key=lambda name: fitted[name].seconds(times[name][-1][0]))
        lines[link] = fitted[best]
        found[link] = {
            name: {
                "bytes": [size for size, _ in points],
                "seconds": [seconds for _, seconds in points],
                "alpha": fitted[name].alpha,
                "beta": fitted[name].beta,
                "worst_error": worst_error(fitted[name], points),
            }
            for name, points in times.items()
        } | {"chosen": best}
    own = dict.fromkeys(("near", "far")) | {name: Link.of(line) for name, line in lines.items()}
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    near = own["near"] or own["far"]  # a node of one GPU sends nothing inside
    assert near is not None
    measured = {"ranks": world.size, "environment": snapshot(), **found}
    sums = {"all_reduce_us": all_reduces(node_size, world), "sums_us": microseconds(counts_of(node_size))}
    return Machine(gpu=gpu, gpus_per_node=node_size, near=near, far=own["far"], measured=measured, **sums)


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through measured ``(bytes, seconds)`` that is nearest by relative error; no coefficient is negative.

    Sizes span several orders of magnitude. The squared error of a point is therefore divided by its squared time,
    otherwise the largest sizes alone would decide.
    """
    import numpy
    from scipy.optimize import nnls

    sizes, seconds = numpy.array(points, dtype=float).T
    # The columns are brought to the same order of magnitude, because bytes and ones differ by eight.
    (alpha, beta), _ = nnls(numpy.stack([1 / seconds, sizes / sizes.max() / seconds], axis=1), numpy.ones(len(points)))
    return Line(float(alpha), float(beta / sizes.max()))


def worst_error(line: Line, points: Sequence[tuple[float, float]]) -> float:
    """The largest relative difference between the line and measured ``(bytes, seconds)``."""
    return max(abs(line.seconds(size) / seconds - 1) for size, seconds in points)


def counts_of(node_size: int) -> list[int]:
    """The numbers of GPUs of a node that are measured: the powers of two, and all of them."""
    return sorted({node_size, *(2**power for power in range(1, node_size.bit_length()))} - {1})


def all_reduces(node_size: int, world: World) -> dict[int, dict[int, float]]:
    """Microseconds of an all-reduce of the first node by GPUs and bytes; every rank calls this.

    The numbers of GPUs are the powers of two in a node, and all of it.
    """
    found: dict[int, dict[int, float]] = {}
    for count in counts_of(node_size):
        group = dist.new_group(list(range(count)))
        found[count] = {}
        for size in SUMS[world.device.type]:
            values = torch.zeros(size // 2, dtype=torch.bfloat16, device=world.device)

            def run(values: torch.Tensor = values, group: Any = group, takes_part: bool = world.rank < count) -> None:
                if takes_part:
                    dist.all_reduce(values, group=group)

            found[count][size] = 1e6 * _seconds(run, world)
    return found


def _transports(link: str, world: World) -> list[tuple[str, Transport]]:
    """The transports that training can use for a link."""
    name = "NCCL" if world.device.type == "cuda" else "gloo"
    if link == "near" and world.device.type == "cuda":
        return [(name, all_to_all), ("copies", CopiesTransport(open_buffers))]
    return [(name, all_to_all)]


def _points(
    transport: Transport, ranks: tuple[int, ...], group: Any, world: World, sizes: tuple[int, ...]
) -> list[tuple[float, float]]:
    """For each size, the bytes that a rank sends to others, and the median seconds on the slowest rank."""
    points = []
    for count in sizes:
        each = max(1, count // len(ranks))
        splits = splits_of([[each] * len(ranks)] * len(ranks), ranks.index(world.rank))
        rows = torch.zeros(each * len(ranks), WIDTH, dtype=torch.bfloat16, device=world.device)
        seconds = _seconds(lambda rows=rows, splits=splits: _exchange(transport, rows, splits, group), world)
        points.append((float(each * (len(ranks) - 1) * WIDTH * 2), seconds))
    return points


def _exchange(transport: Transport, rows: torch.Tensor, splits: Splits, group: Any) -> None:
    transport(rows, splits, group, False)[1].wait()


def _seconds(run: Callable[[], None], world: World) -> float:
    """The slowest rank's median time over the repeats, after two that do not count. All ranks start together."""
    times = [together(run, world.device) / 1e3 for _ in range(REPEATS + 2)]
    return max(world.everywhere(lambda: statistics.median(times[2:])))


def to_text(machine: Machine) -> str:
    """Says what was found: a line for each link."""
    links = {"near": machine.near, "far": machine.far}
    lines = [f"{name}: {link.latency_us:.0f} µs and {link.gb_per_s:.3g} GB/s" for name, link in links.items() if link]
    for name, table in {"": machine.all_reduce_us, **machine.sums_us}.items():
        for ranks, times in table.items():
            (least, shortest), *_, (most, longest) = sorted(times.items())
            lines.append(
                f"all-reduce of {ranks} GPUs{name and f' by {name}'}: {shortest:.0f} µs for {least / 2**10:.0f} KiB, "
                f"{longest:.0f} µs for {most / 2**20:.0f} MiB"
            )
    return "\n".join(lines)


def write(machine: Machine, path: Path) -> None:
    """Writes the machine file."""
    write_text(path, json.dumps(machine.model_dump(exclude_none=True), indent=1) + "\n")
