"""The ways to reduce that ``all_reduce`` times: fcsd's kinds, their variants, and the baselines of torch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.all_reduce.memory import Rooms, Shape
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import quantised, symmetric
from fcsd.parallel.all_reduce.window import OnStream, Window, try_window


class Way(NamedTuple):
    """A way to reduce.

    Attributes:
        run: replaces its argument by the sum over the ranks, on the current stream.
        format: the format of the values sent; None for the values as they are.
        in_graphs: whether a CUDA graph of it can be replayed: no host code runs between its steps.
        checked: whether ``run`` uses its argument, so that its result can be compared with the reference.
    """

    run: Callable[[Tensor], Any]
    format: Format | None = None
    in_graphs: bool = True
    checked: bool = True


def kinds(formats: Iterable[Format]) -> dict[str, Way]:
    """The kinds of ``reduce`` by name, and the quantised one in steps. All ranks make this call.

    Args:
        formats: the formats of quantised reductions.
    """
    group = dist.group.WORLD
    ways = {"nccl": Way(dist.all_reduce)}
    one_kernel = try_window(group) is not None
    if one_kernel:
        ways["symmetric"] = Way(lambda x: symmetric.all_reduce(x, group).wait())
    for format in formats:
        if one_kernel:
            ways[f"quantised:{format}"] = Way(partial(_quantised, format, False), format)
        ways[f"quantised:{format} in steps"] = Way(partial(_quantised, format, True), format, in_graphs=False)
    return ways


def _quantised(format: Format, in_steps: bool, x: Tensor) -> None:
    quantised.all_reduce(x, format, dist.group.WORLD, in_steps).wait()


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
