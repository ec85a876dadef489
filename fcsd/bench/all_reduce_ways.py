"""The ways to reduce that ``all_reduce`` times: fcsd's kinds, their variants, and the baselines of torch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.all_reduce.memory import Rooms, Shape
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import copies, quantised, symmetric
from fcsd.parallel.all_reduce.quantised import Topology, nodes_of
from fcsd.parallel.all_reduce.window import OnStream, Window, try_window


class Way(NamedTuple):
    """A way to reduce.

    Attributes:
        run: replaces its argument by the sum over the ranks, on the current stream.
        format: the format of the wire; None for the values as they are.
        node_size: ranks of a node of a quantised reduction by nodes.
        in_graphs: whether a CUDA graph of it can be replayed: no flag gets a new number in each call, and no host code
            runs between its steps.
        error: the largest error as a share of the sum of the summands' magnitudes, if there is no format.
        checked: whether ``run`` uses its argument, so that its result can be compared with the reference.
    """

    run: Callable[[Tensor], Any]
    format: Format | None = None
    node_size: int | None = None
    in_graphs: bool = True
    error: float = 2**-6
    checked: bool = True


def kinds(formats: Iterable[Format], node_size: int | None, chunks: int) -> dict[str, Way]:
    """The kinds of ``reduce`` by name, and the quantised one in steps. All ranks make this call.

    Args:
        formats: the formats of quantised reductions.
        node_size: ranks of a node, for quantised reductions by nodes; None leaves them out.
        chunks: chunks of quantised reductions in chunks.

    Raises:
        ConfigError: the ranks cannot be divided into nodes of this size.
    """
    group = dist.group.WORLD
    ways = {"nccl": Way(dist.all_reduce)}
    one_kernel = try_window(group) is not None
    if one_kernel:
        ways["symmetric"] = Way(lambda x: symmetric.all_reduce(x, group).wait())
        ways["copies"] = Way(lambda x: copies.all_reduce(x, group).wait(), in_graphs=False)
    steps = Topology(group, steps=True)
    topologies = {"in steps": steps, "in steps, in chunks": steps._replace(chunks=chunks)}
    if node_size is not None:
        nodes = nodes_of(group, node_size)
        topologies |= {"by nodes": nodes, "by nodes, in chunks": nodes._replace(chunks=chunks)}
    for format in formats:
        if one_kernel:
            ways[f"quantised:{format}"] = Way(partial(_quantised, format, Topology(group)), format)
        for name, topology in topologies.items():
            nodes_of_size = None if topology.near is None else node_size
            run = partial(_quantised, format, topology)
            ways[f"quantised:{format} {name}"] = Way(run, format, nodes_of_size, in_graphs=False)
    return ways


def _quantised(format: Format, topology: Topology, x: Tensor) -> None:
    quantised.all_reduce(x, format, topology).wait()


def shapes(formats: Iterable[Format], blocks: Iterable[int]) -> dict[str, Way]:
    """The kernels of ``symmetric``, and of ``quantised`` in one and two shots, with different numbers of blocks.

    Each block occupies one SM.
    """
    window = try_window(dist.group.WORLD)
    if window is None:
        return {}
    ways: dict[str, Way] = {}
    rooms = window.rooms(dist.group.WORLD)
    assert rooms is not None, "no graph is being captured"
    for number in blocks:
        ways[f"symmetric, rooms, {number} blocks"] = Way(partial(_in_rooms, window, rooms, number))
        for shot in ("one shot", "two shots"):
            ways[f"symmetric, {shot}, {number} blocks"] = Way(partial(_shaped, window, shot, number, None))
            for format in formats:
                run = partial(_shaped, window, shot, number, format)
                ways[f"quantised:{format}, {shot}, {number} blocks"] = Way(run, format)
    return ways


def _shaped(window: Window, shot: str, blocks: int, format: Format | None, x: Tensor) -> None:
    from fcsd.kernels.all_reduce import launch

    shape = Shape(shot == "one shot", blocks)
    if format is None:
        OnStream(window.stream, x, lambda: launch.all_reduce(x, window.memory, shape)).wait()
    else:
        OnStream(window.stream, x, lambda: launch.all_reduce_quantised(x, window.memory, shape, format)).wait()


def _in_rooms(window: Window, rooms: Rooms, blocks: int, x: Tensor) -> None:
    from fcsd.kernels.all_reduce import launch

    OnStream(window.stream, x, lambda: launch.all_reduce_large(x, window.memory, rooms, blocks)).wait()


def fp8(blocks: Iterable[int]) -> dict[str, Way]:
    """The baseline in fp8 with different numbers of blocks."""
    window = try_window(dist.group.WORLD)
    if window is None:
        return {}
    return {f"fp8, two shots, {number} blocks": Way(partial(_fp8, window, number), error=2**-3) for number in blocks}


def _fp8(window: Window, blocks: int, x: Tensor) -> None:
    from fcsd.bench.baselines import fp8_all_reduce

    OnStream(window.stream, x, lambda: fp8_all_reduce.all_reduce(x, window.memory, blocks)).wait()


def of_torch(x: Tensor) -> dict[str, Way]:
    """torch's own all-reduces over symmetric memory, for values of the shape of ``x``, without multicast.

    They reduce a tensor in symmetric memory, so that no copy counts. Its values are those of ``x`` at first.
    """
    group = dist.group.WORLD
    if try_window(group) is None:
        return {}
    from torch.distributed import _symmetric_memory as symmetric_memory

    assert group is not None
    values = symmetric_memory.empty(*x.shape, dtype=x.dtype, device=x.device)
    symmetric_memory.rendezvous(values, group)
    values.copy_(x)
    out = torch.empty_like(values)
    name, ops = group.group_name, torch.ops.symm_mem
    return {
        "torch one shot": Way(lambda _: ops.one_shot_all_reduce_out(values, "sum", name, out), checked=False),
        "torch two shots": Way(lambda _: ops.two_shot_all_reduce_(values, "sum", name), checked=False),
    }
