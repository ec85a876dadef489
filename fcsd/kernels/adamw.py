"""Updates a bf16 weight by AdamW with an fp32 master weight, in one Triton kernel.

The kernel reads the gradient once and reads and writes the master weight and both moments once, which takes 28 bytes
for each parameter with a bf16 gradient. The same update in steps of torch takes 42: the gradient is clipped in place
and converted to fp32, and the new master weight is read again to round it. ``update_reference`` computes the same in
torch, and is what runs on CPUs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of one program


class Rates(NamedTuple):
    """The numbers of AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) that the host knows."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Moments(NamedTuple):
    """What AdamW keeps for a weight, fp32 tensors of its shape."""

    master: Tensor
    first: Tensor
    second: Tensor


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of the norm ``norm`` are multiplied by, so that their norm is at most ``limit``; at most 1."""
    return 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)  # 1e-6, as DeepSpeed and torch do


def device_numbers(norm: Tensor, taken: Tensor, limit: float, rates: Rates) -> Tensor:
    """The numbers of the update that depend on what is on the device, fp32 ``[4]``.

    These are: 1 if the step is taken, else 0; the factor that clips the gradients; and the reciprocals of the
    corrections of the first moment and of the root of the second one.

    Args:
        norm: the norm of all gradients. If it is not finite, the step is not taken.
        taken: fp64, the number of steps taken so far, this one included if it is taken.
        limit: the norm to which the gradients are clipped; 0 does not clip.
    """
    factor = clip_factor(norm, limit) if limit else torch.ones_like(norm)
    corrections = 1.0 / (1.0 - rates.beta1**taken), (1.0 - rates.beta2**taken).rsqrt()
    return torch.stack([number.float() for number in (norm.isfinite(), factor, *corrections)])


def update(weight: Tensor, gradient: Tensor, kept: Moments, numbers: Tensor, rates: Rates) -> None:
    """Takes a step of AdamW in place, if ``numbers`` says that it is taken.

    Args:
        weight: of any floating dtype, without gaps in memory; receives the rounded master weight.
        gradient: of the shape of ``weight``, in any floating dtype.
        kept: with the strides of ``weight``; is updated in place.
        numbers: the result of ``device_numbers``.
    """
    if not weight.is_cuda:
        update_reference(weight, gradient, kept, numbers, rates)
        return
    launch(weight, gradient, kept, numbers, rates)


def update_reference(weight: Tensor, gradient: Tensor, kept: Moments, numbers: Tensor, rates: Rates) -> None:
    """``update`` in torch. The host waits for the device."""
    taken, factor, first_scale, second_scale = numbers.tolist()
    if not taken:
        return
    clipped = gradient.float() * factor
    kept.first.mul_(rates.beta1).add_(clipped, alpha=1 - rates.beta1)
    kept.second.mul_(rates.beta2).addcmul_(clipped, clipped, value=1 - rates.beta2)
    change = kept.first / kept.second.sqrt().mul_(second_scale).add_(rates.eps)
    kept.master.mul_(1 - rates.lr * rates.weight_decay).sub_(change.mul_(rates.lr * first_scale))
    weight.copy_(kept.master)


def launch(weight: Tensor, gradient: Tensor, kept: Moments, numbers: Tensor, rates: Rates) -> None:
    """``update`` by the kernel, which Triton's interpreter runs on CPUs."""
    count = weight.numel()
    block: Any = _BLOCK
    if gradient.stride() != weight.stride():  # the kernel takes all tensors as they lie in memory
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    # 1 - beta is computed in fp64 here, because in fp32 it would lose digits of a beta near 1.
    host = (rates.lr, rates.beta1, 1 - rates.beta1, rates.beta2, 1 - rates.beta2, rates.eps)
    decay = 1 - rates.lr * rates.weight_decay
    with torch.cuda.device_of(weight):
        _update_kernel[(triton.cdiv(count, block),)](weight, gradient, *kept, numbers, *host, decay, count, BLOCK=block)


@triton.jit
def _update_kernel(
    weight, gradient, master, first, second, numbers,
    lr, beta1, rest1, beta2, rest2, eps, decay, count, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers) != 0:
        factor, first_scale, second_scale = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(first + at, mask=inside, other=0.0) * beta1 + g * rest1
        v = tl.load(second + at, mask=inside, other=0.0) * beta2 + g * g * rest2
        w = tl.load(master + at, mask=inside, other=0.0) * decay
        w -= lr * first_scale * m / (tl.sqrt(v) * second_scale + eps)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        tl.store(master + at, w, mask=inside)
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
