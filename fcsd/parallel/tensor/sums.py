"""The sums over ranks of tensor-parallel training, each started and awaited apart, forward and backward.

Ranks hold parts of a sub-block's weights, as Megatron-LM shards them (§3). In the forward pass the outputs of a
sub-block are partial sums (``partial_output``), whose gradient every rank has. In the backward pass the gradients of a
sub-block's input are partial sums (``column_input``), because each rank has computed with its own columns alone.

The gradient of an input consists of two autograd nodes. ``_StartGradient`` starts the sum as soon as the sub-block's
backward pass has run. ``_AwaitGradient`` awaits it. The one edge between them carries the gradient that is still being
summed, so no other node can read it or add to it. The await gets the number of an earlier place in the forward pass
(``order``). The backward passes of the sub-blocks behind that place therefore run first, as far as they do not need the
sum. They need it where a wiring reads the full stream, and autograd then has no other node to run than the await. So
one rule gives the backward schedule of every wiring: await last.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.parallel import order
from fcsd.parallel.all_reduce.reduce import Reduction, reduce
from fcsd.parallel.tensor.tp_plan import TensorGroup

Mode = Literal["on", "eager-sync", "own-weights", "off"]


@dataclass(frozen=True)
class TrainingSums:
    """How the sums of a model in training travel.

    Attributes:
        ranks: the ranks that shard the model.
        mode: ``on`` awaits every sum where it is first needed. ``eager-sync`` takes the same order, but awaits every
            sum where it starts. ``off`` sums at once and leaves the order of the backward pass to autograd.
            ``own-weights`` sums at once in the forward pass, and hides the sum of a gradient under the weight gradients
            of the products that made it, as Megatron-LM does.
        backend: how the ranks sum; see ``parallel.all_reduce.backends``. ``none`` sends nothing, which gives wrong
            results in the time without communication.
    """

    ranks: TensorGroup
    mode: Mode = "on"
    backend: str = "nccl"

    @property
    def waits(self) -> bool:
        """Whether the sums of the forward pass are awaited where they start."""
        return self.mode != "on"

    @property
    def orders(self) -> bool:
        """Whether sums of gradients are awaited last; otherwise autograd's own order holds."""
        return self.mode in ("on", "eager-sync")


def column_input(x: Tensor, sums: TrainingSums, layer: int, gradient_awaited_at: int | None) -> Tensor:
    """``x``, as the column-parallel products of a sub-block read it. Its gradient is summed over the ranks.

    Args:
        x: equal on all ranks, of any shape.
        layer: 0-based index of the decoder layer, for the profiler.
        gradient_awaited_at: the place of the backward pass at which the gradient is awaited at the latest, from
            ``order.mark``; None for autograd's own order.
    """
    if sums.ranks.degree == 1:
        return x
    gradient = Reduction(sums.ranks.group, sums.backend, layer)
    if sums.mode == "off":
        return _SumGradient.apply(x, gradient, True)
    waits = sums.mode == "eager-sync"
    x = _AwaitGradient.apply(x, gradient, waits)
    order.run_at(x, gradient_awaited_at)
    return _StartGradient.apply(x, gradient, waits)


def partial_output(out: Tensor, sums: TrainingSums, layer: int) -> Reduction:
    """Start to sum the output of a row-parallel product over the ranks; it may be written over. ``wait`` returns it."""
    return reduce(out, sums.ranks.group, sums.backend, layer)


class KeptGradient(torch.autograd.Function):
    """Passes a tensor on, and keeps the sum of its gradient for the backward pass, and whether to await it at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Any, waits: bool) -> Tensor:
        ctx.gradient, ctx.waits = gradient, waits
        return x.view_as(x)


class _AwaitGradient(KeptGradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # ``grad`` is the memory of the sum, which may still be in flight.
        return grad if ctx.waits else ctx.gradient.wait(), None, None


class _StartGradient(KeptGradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The sub-block's products made this gradient and nothing else reads it, so the sum is written over it.
        grad = grad.contiguous()
        ctx.gradient.start(grad, "bwd")
        if ctx.waits:
            ctx.gradient.wait()
        return grad, None, None


class _SumGradient(KeptGradient):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradient.start(grad.contiguous(), "bwd")
        return ctx.gradient.wait(), None, None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def sum_of_parts(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a tensor from which each rank computes something else: its gradient is summed, too."""
    return _SumOfParts.apply(x, group)


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
