"""The ways to reduce that ``all_reduce`` times: fcsd's backends, and the baselines of torch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce import quantised
from fcsd.parallel.all_reduce.reduce import reduce
from fcsd.parallel.all_reduce.symmetric import try_window


class Way(NamedTuple):
    """A way to reduce.

    Attributes:
        run: replaces its argument by the sum over the ranks, on the current stream.
        format: the format of the values sent; None for the values as they are.
        checked: whether ``run`` uses its argument, so that its result can be compared with the reference.
    """

    run: Callable[[Tensor], Any]
    format: Format | None = None
    checked: bool = True


def kinds(formats: Iterable[Format]) -> dict[str, Way]:
    """The backends of ``reduce`` by name. All ranks make this call.

    Args:
        formats: the formats of quantised reductions.
    """
    group = dist.group.WORLD
    ways = {"nccl": Way(dist.all_reduce)}
    if try_window(group) is not None:
        ways["symmetric"] = Way(lambda x: reduce(x, group, "symmetric").wait())
    steps = "one step" if quantised.is_one_step(group) else "steps"
    for format in formats:
        ways[f"quantised:{format} in {steps}"] = Way(partial(_quantised, format), format)
    return ways


def _quantised(format: Format, x: Tensor) -> None:
    quantised.all_reduce(x, format, dist.group.WORLD).wait()


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
