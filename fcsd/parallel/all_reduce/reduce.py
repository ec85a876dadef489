"""All-reduces in flight: a sum over ranks starts when its last summand is known, and is awaited where it is read.

Under tensor parallelism (Megatron-LM §3) the ranks hold partial sums of the output of attention and of the MLP.
``reduce`` sums them: its gradient is the identity, because every rank computes the same loss from the same sum.
``reduce_gradient`` is its transpose, for the input of a sub-block. It changes nothing in the forward pass. In the
backward pass it sums the gradients of all ranks, of which each rank has its own part.

The kinds of reduction are

    nccl               the all-reduce of torch.distributed, by gloo on CPUs
    symmetric          one kernel in the symmetric memory of the GPUs of one host, see ``symmetric``
    copies             the same by copy engines and a small kernel, see ``copies``
    auto               ``nccl`` or ``symmetric``, by the size of the message, see ``choice``
    quantised:FORMAT   rows that are quantised on the wire, see ``quantised``; FORMAT as in docs/wires.md
    none               sends nothing, so its results are wrong; its time is a lower bound for all other kinds
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fcsd.errors import ConfigError, unknown_value
from fcsd.kernels.bit_split import Format
from fcsd.parallel import order
from fcsd.parallel.all_reduce import choice, copies, quantised, symmetric, window
from fcsd.parallel.all_reduce.quantised import Topology
from fcsd.parallel.transports.transport import Work

Kind = str
KINDS = ("nccl", "symmetric", "copies", "auto", "quantised:FORMAT", "none")
WRONG_RESULTS = ("none",)
_QUANTISED = "quantised:"
_BETWEEN_GPUS = {"symmetric": symmetric.all_reduce, "copies": copies.all_reduce}


class Reduction:
    """A sum over the ranks of a group; it may still be in flight.

    Raises:
        ConfigError: the kind or its format is unknown, or the ranks cannot reduce in this way.

    Attributes:
        exact: whether ``wait`` returns the sum, up to the rounding of a format; False for the kinds in
            ``WRONG_RESULTS``.
        format: the format of the wire; None for the values as they are.
    """

    def __init__(self, group: Any, kind: Kind, layer: int) -> None:
        self.format = format_of(kind)
        self.exact = kind not in WRONG_RESULTS
        self._topology = group if isinstance(group, Topology) else Topology(group)
        self._layer, self._kind = layer, kind
        self._sends = kind != "none" and dist.get_world_size(self._topology.whole) > 1
        if self._sends and kind in _BETWEEN_GPUS:
            window.window_of(self._topology.whole)
        elif self._sends and kind == "auto":
            window.try_window(self._topology.whole)  # now, because it cannot be made while a CUDA graph is captured
        self._work: Work | None = None
        self._tensor: Tensor | None = None

    def start(self, x: Tensor, passes: str) -> None:
        """Start to replace ``x`` by its sum; ``passes`` is ``fwd``, ``bwd`` or ``recompute``."""
        self._tensor = x
        if self._sends:
            with record_function(f"fcsd::reduce.{passes}.L{self._layer}"):
                if self.format is not None:
                    self._work = quantised.all_reduce(x, self.format, self._topology)
                else:
                    self._work = self._started(x)

    def _started(self, x: Tensor) -> Work | None:
        """The all-reduce of values that are not quantised."""
        group = self._topology.whole
        kind = choice.fastest(x, group) if self._kind == "auto" else self._kind
        if kind in _BETWEEN_GPUS:
            return _BETWEEN_GPUS[kind](x.detach(), group)
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
    if kind.startswith(_QUANTISED):
        return Format.parse(kind.removeprefix(_QUANTISED))
    if kind not in KINDS:
        raise unknown_value("kind of reduction", kind, KINDS)
    return None


def reduce(x: Tensor, group: Any, kind: Kind = "nccl", layer: int = 0) -> Reduction:
    """Start to sum ``x``, of any shape, over the ranks of ``group``; differentiable.

    The sum is written over ``x``, so nothing else may use ``x`` afterwards. If autograd has saved ``x``, the backward
    pass raises torch's error for a tensor that was modified in place. The gradient of quantisation is the identity.

    Args:
        group: the process group, or a ``Topology`` for a quantised reduction by nodes or in chunks.
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


def reduce_gradient(
    x: Tensor, group: Any, kind: Kind = "nccl", layer: int = 0, awaited_at: int | None = None
) -> Tensor:
    """Return ``x``, of any shape, with a gradient that is summed over the ranks of ``group``.

    The sum starts when the gradients of all readers of the result are known.

    Args:
        group: the process group, or a ``Topology`` for a quantised reduction by nodes or in chunks.
        kind: how the ranks reduce; see the list at the top of this file.
        layer: 0-based index of the decoder layer, for the profiler.
        awaited_at: the place in the backward pass where the sum is awaited, from ``order.mark``; None awaits it as
            soon as no node is ready that was created later.

    Raises:
        ConfigError: the kind is unknown, or its format has integer scales, which gradients are too small for.
    """
    own = format_of(kind)
    if own is not None and own.meta == "int":
        bf16 = replace(own, meta="bf16")
        raise ConfigError(
            f"{kind}: integer scales cannot express values as small as gradients", hint=f"write {_QUANTISED}{bf16}"
        )
    reduction = Reduction(group, kind, layer)
    awaited: Any = _AwaitGradient.apply(x, reduction)
    order.run_at(awaited, awaited_at)
    return _StartGradient.apply(awaited, reduction)


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


class _AwaitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del grad  # the sum in flight
        return ctx.reduction.wait(), None


class _StartGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.clone(memory_format=torch.contiguous_format)  # other nodes may hold the same tensor
        ctx.reduction.start(own, "bwd")
        return own, None
