"""Computes the losses of ``fcsd.distill.loss.losses`` on GPUs, in two passes over the logits.

The functions have the same arguments and results as the reference in ``fcsd.distill.loss.losses``.

cuBLAS computes the logits of a chunk (bf16 operands, fp32 sums). The Triton kernels of ``vocabulary`` compute from them
the losses and the gradient with respect to the student's logits. Two more products compute from it the gradients with
respect to the hidden states and to the head. The backward pass recomputes nothing.

The gradient of a chunk is held in the dtype of the head (bf16: 2 bytes per logit). The fp32 logits take 4 bytes for
each of the two models, and they are computed for half a chunk at a time. The products with the gradient use whole
chunks, because the head's gradient is read and written once for each chunk. In total the memory is 6 bytes for each
token of a chunk and each word of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.kernels.vocabulary import Launch, divergence, multiply_, negative_log_likelihood

IGNORE = -100  # the label of a position that does not count

_LOGIT_SHARE = 2  # logits are computed for ``chunk_tokens / _LOGIT_SHARE`` tokens at a time

Rows = slice | Tensor  # a range of positions, or the indices of the positions that count
# (rows, their student logits [rows, vocab] fp32, gradient [rows, vocab] to fill or None) -> losses [rows, spans]
Fill = Callable[[Rows, Tensor, Tensor | None], Tensor]


LAUNCH = Launch()


def kl_divergence(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    denominator: float | Tensor = 1.0,
    chunk_tokens: int = 512,
    kept: Tensor | None = None,
    launch: Launch = LAUNCH,
) -> Tensor:
    """KL(teacher ‖ student); arguments and result are those of ``fcsd.distill.loss.losses.kl_divergence``."""
    share = _share(student_hidden, denominator)
    scale = share * temperature  # the factor T^2 of the loss times the factor 1/T of the softmax
    teacher_rows = teacher_hidden.detach().flatten(0, -2)
    teacher_weight = _for_matmul(teacher_head.detach())

    def fill(rows: Rows, student: Tensor, gradient: Tensor | None) -> Tensor:
        teacher = _product(teacher_rows[rows].to(teacher_weight.dtype), teacher_weight.t())
        return divergence(student, teacher, gradient, scale, temperature, launch)

    return _swept(student_hidden, student_head, mask, kept, fill, scale * temperature, chunk_tokens)


def cross_entropy(
    student_hidden: Tensor,
    student_head: Tensor,
    labels: Tensor,
    *,
    denominator: float | Tensor = 1.0,
    chunk_tokens: int = 512,
    kept: Tensor | None = None,
    launch: Launch = LAUNCH,
) -> Tensor:
    """Negative log-likelihood; arguments and result are those of ``fcsd.distill.loss.losses.cross_entropy``."""
    scale = _share(student_hidden, denominator)
    targets = labels.flatten()

    def fill(rows: Rows, logits: Tensor, gradient: Tensor | None) -> Tensor:
        return negative_log_likelihood(logits, targets[rows], gradient, scale, launch)

    return _swept(student_hidden, student_head, labels != IGNORE, kept, fill, scale, chunk_tokens)


def _swept(
    hidden: Tensor,
    head: Tensor,
    counts: Tensor,
    kept: Tensor | None,
    fill: Fill,
    scale: Tensor,
    chunk_tokens: int,
) -> Tensor:
    """``scale`` times the sum of ``fill`` over the positions that count."""
    keep = counts.flatten().nonzero().squeeze(1) if kept is None else kept
    chunks = range(0, len(keep), chunk_tokens)
    gathered = keep if len(keep) < counts.numel() else None
    return _FusedHeadLoss.apply(  # type: ignore[return-value]
        hidden.flatten(0, -2), head, gathered, chunks, fill, scale, torch.is_grad_enabled()
    )


class _FusedHeadLoss(torch.autograd.Function):
    """Computes the loss and its gradients in one sweep over the chunks; the backward pass only returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        keep: Tensor | None,
        chunks: range,
        fill: Fill,
        scale: Tensor,
        training: bool,
    ) -> Tensor:
        weight = _for_matmul(head)
        to_hidden = torch.zeros_like(hidden) if training and ctx.needs_input_grad[0] else None
        to_head = torch.zeros_like(weight) if training and ctx.needs_input_grad[1] else None
        wanted = to_hidden is not None or to_head is not None
        step = max(1, chunks.step // _LOGIT_SHARE)
        total = torch.zeros_like(scale)
        with torch.cuda.device_of(hidden):
            for start in chunks:
                rows = _rows(keep, start, min(start + chunks.step, chunks.stop))
                inputs = hidden[rows].to(weight.dtype)
                gradient = weight.new_empty(len(inputs), len(weight)) if wanted else None
                for at in range(0, len(inputs), step):
                    end = min(at + step, len(inputs))
                    part = None if gradient is None else gradient[at:end]
                    # No variable refers to the logits here, so that they are freed before the next ones are computed.
                    losses = fill(_rows(keep, start + at, start + end), _product(inputs[at:end], weight.t()), part)
                    total += losses.sum()
                if gradient is not None and to_hidden is not None:
                    to_hidden[rows] = (gradient @ weight).to(hidden.dtype)
                if gradient is not None and to_head is not None:
                    to_head.addmm_(gradient.t(), inputs)
        ctx.gradients = (to_hidden, None if to_head is None else to_head.to(head.dtype))
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a fused loss were already handed out: run its forward again")
        gradients, ctx.gradients = ctx.gradients, None  # this reference is dropped: .grad may be the same buffers
        with torch.cuda.device_of(upstream):
            scaled = [None if g is None else multiply_(g, upstream) for g in gradients]
        return (*scaled, *[None] * 5)


def _share(hidden: Tensor, denominator: float | Tensor) -> Tensor:
    """``1 / denominator`` as an fp32 scalar on the device; the host does not wait for it."""
    return (torch.ones((), device=hidden.device) / denominator).float()


def _rows(keep: Tensor | None, start: int, stop: int) -> Rows:
    """The positions ``start`` to ``stop`` among those that count; a slice if all positions count."""
    return slice(start, stop) if keep is None else keep[start:stop]


def _for_matmul(head: Tensor) -> Tensor:
    """The head in the dtype of the products: its own on GPUs, which sum bf16 products in fp32, and fp32 on CPUs."""
    return head if head.is_cuda else head.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` as fp32; the result is not rounded to half precision if the operands have half precision."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)
