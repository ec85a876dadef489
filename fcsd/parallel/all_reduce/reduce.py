"""All-reduces in flight: a sum over ranks starts when its last summand is known, and is awaited where it is read.

Under tensor parallelism (Megatron-LM §3) the ranks hold partial sums of the output of attention and of the MLP.
``reduce`` sums them: its gradient is the identity, because every rank computes the same loss from the same sum.

The kinds of reduction are

    nccl               the all-reduce of torch.distributed, by gloo on CPUs
    symmetric          one kernel in the symmetric memory of the GPUs of one host, see ``symmetric``
    auto               ``nccl`` or ``symmetric``, by the size of the message, see ``choice``
    quantised:FORMAT   rows in a format, see ``quantised`` and docs/quantised_communication.md
    none               sends nothing, so its results are wrong; its time is a lower bound for all other kinds
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fcsd.errors import unknown_value
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.format import format_of_reduction
from fcsd.parallel import order
from fcsd.parallel.all_reduce import choice, quantised, symmetric, window
from fcsd.parallel.transports.transport import Work

Kind = str
KINDS = ("nccl", "symmetric", "auto", "quantised:FORMAT", "none")
WRONG_RESULTS = ("none",)
_QUANTISED = "quantised:"


class Reduction:
    """A sum over the ranks of a group; it may still be in flight.

    Raises:
        ConfigError: the kind or its format is unknown, or the ranks cannot reduce in this way.

    Attributes:
        exact: whether ``wait`` returns the sum, up to the rounding of a format; False for the kinds in
            ``WRONG_RESULTS``.
        format: the format of the values sent; None for the values as they are.
    """

    def __init__(self, group: Any, kind: Kind, layer: int) -> None:
        self.format = format_of(kind)
        self.exact = kind not in WRONG_RESULTS
        self._group, self._layer, self._kind = group, layer, kind
        self._sends = kind != "none" and dist.get_world_size(group) > 1
        if self._sends and kind == "symmetric":
            window.window_of(group)
        elif self._sends and kind == "auto":
            window.try_window(group)  # now, because it cannot be made while a CUDA graph is captured
        self._work: Work | None = None
        self._tensor: Tensor | None = None

    def start(self, x: Tensor, passes: str) -> None:
        """Start to replace ``x`` by its sum; ``passes`` is ``fwd`` or ``recompute``."""
        self._tensor = x
        if self._sends:
            with record_function(f"fcsd::reduce.{passes}.L{self._layer}"):
                if self.format is not None:
                    self._work = quantised.all_reduce(x, self.format, self._group)
                else:
                    self._work = self._started(x)

    def _started(self, x: Tensor) -> Work | None:
        """The all-reduce of values that are not quantised."""
        group = self._group
        kind = choice.fastest(x, group) if self._kind == "auto" else self._kind
        if kind == "symmetric":
            return symmetric.all_reduce(x.detach(), group)
        return dist.all_reduce(x, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Wait, and return the sum in the memory of the tensor that was passed to ``start``. It is called once."""
        work, self._work = self._work, None
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "a reduction is awaited once, after it was started"
        if work is not None:
            work.wait()
        return tensor


def format_of(kind: Kind) -> Format | None:
    """The format of a quantised kind of reduction; None for the other kinds.

    Raises:
        ConfigError: there is no such kind, or no such format.
    """
    format = format_of_reduction(kind)
    if format is None and kind not in KINDS:
        raise unknown_value("kind of reduction", kind, KINDS)
    return format


def reduce(x: Tensor, group: Any, kind: Kind = "nccl", layer: int = 0) -> Reduction:
    """Start to sum ``x``, of any shape, over the ranks of ``group``; differentiable.

    The sum is written over ``x``, so nothing else may use ``x`` afterwards. If autograd has saved ``x``, the backward
    pass raises torch's error for a tensor that was modified in place. The gradient of quantisation is the identity.

    Args:
        group: the process group.
        kind: how the ranks reduce; see the list at the top of this file.
        layer: 0-based index of the decoder layer, for the profiler.

    Raises:
        ConfigError: the kind or its format is unknown, or the groups of the format do not divide the rows of ``x``.
    """
    reduction = Reduction(group, kind, layer)
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
