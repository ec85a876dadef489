"""All-reduces in flight: a sum over ranks starts when its last summand is known, and is awaited where it is read.

Under tensor parallelism (Megatron-LM §3) the ranks hold partial sums of the output of attention and of the MLP.
``reduce`` sums them: its gradient is the identity, because every rank computes the same loss from the same sum.

``backends`` has the table of the ways in which ranks sum.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fcsd.parallel import order
from fcsd.parallel.all_reduce.backends import Start, backend_of
from fcsd.parallel.transports.transport import Work


class Reduction:
    """A sum over the ranks of a group; it may still be in flight.

    Raises:
        ConfigError: the backend or its format is unknown, or the ranks cannot reduce in this way.
    """

    def __init__(self, group: Any, backend: str, layer: int) -> None:
        found, format = backend_of(backend, "engine")
        self._layer = layer
        self._start: Start | None = None
        if found.open is not None and dist.get_world_size(group) > 1:
            self._start = found.open(group, format)
        self._work: Work | None = None
        self._tensor: Tensor | None = None

    def start(self, x: Tensor, passes: str) -> None:
        """Start to replace ``x`` by its sum; ``passes`` is ``fwd`` or ``recompute``."""
        self._tensor = x
        if self._start is not None:
            with record_function(f"fcsd::reduce.{passes}.L{self._layer}"):
                self._work = self._start(x)

    def wait(self) -> Tensor:
        """Wait, and return the sum in the memory of the tensor that was passed to ``start``. It is called once."""
        work, self._work = self._work, None
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "a reduction is awaited once, after it was started"
        if work is not None:
            work.wait()
        return tensor


def reduce(x: Tensor, group: Any, backend: str = "nccl", layer: int = 0) -> Reduction:
    """Start to sum ``x``, of any shape, over the ranks of ``group``; differentiable.

    The sum is written over ``x``, so nothing else may use ``x`` afterwards. If autograd has saved ``x``, the backward
    pass raises torch's error for a tensor that was modified in place. The gradient of quantisation is the identity.

    Args:
        backend: the name of the backend, see ``backends``.
        layer: 0-based index of the decoder layer, for the profiler.

    Raises:
        ConfigError: the backend or its format is unknown, or the groups of the format do not divide the rows of ``x``.
    """
    reduction = Reduction(group, backend, layer)
    x = x.contiguous()
    if x.requires_grad and torch.is_grad_enabled():
        _Reduce.apply(x, reduction)
    else:
        reduction.start(x, _forward_pass())
    return reduction


def _forward_pass() -> str:
    return "recompute" if order.in_backward() else "fwd"


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: Reduction) -> Tensor:
        ctx.mark_dirty(x)
        reduction.start(x, _forward_pass())
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
