"""Triton kernels that compute a distillation loss and its gradient from fp32 logits ``[rows, vocab]``.

A row is divided into spans of columns, and one program computes one span. The first pass writes the log-sum-exp of
every span. The second pass combines them, and writes the loss of each span and the gradient. Nothing else of the size
of the logits is written.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # finite, so that exp(-inf - _LOWEST) is 0 and not NaN


@dataclass(frozen=True)
class Launch:
    """How the kernels are launched.

    Args:
        block: the number of columns that a program holds at once.
        span: the number of columns that a program computes in all.
        warps: the number of warps of a program.
    """

    block: int = 2048
    span: int = 16384
    warps: int = 8

    def options(self) -> dict[str, Any]:
        return {"BLOCK": self.block, "SPAN": self.span, "num_warps": self.warps}


def log_sum_exp_parts(logits: Tensor, temperature: float, launch: Launch) -> Tensor:
    """The log-sum-exp of each span of ``logits / temperature``: ``[rows, spans]`` fp32.

    Args:
        logits: ``[rows, vocab]`` fp32, contiguous.
    """
    rows, vocab = logits.shape
    parts = logits.new_empty(rows, math.ceil(vocab / launch.span))
    _log_sum_exp_kernel[tuple(parts.shape)](logits, parts, vocab, 1 / temperature, **launch.options())
    return parts


def divergence(
    student: Tensor, teacher: Tensor, gradient: Tensor | None, scale: Tensor, temperature: float, launch: Launch
) -> Tensor:
    """KL(teacher ‖ student) of logits divided by the temperature; writes ``scale * (p - q)`` into ``gradient``.

    Args:
        student, teacher: ``[rows, vocab]`` fp32 logits, contiguous.
        gradient: ``[rows, vocab]`` in the dtype of the products that follow; None if no gradient is needed.
        scale: fp32 scalar on the same device.

    Returns: the part of the divergence from each span, ``[rows, spans]`` fp32, without ``scale``.
    """
    student_parts = log_sum_exp_parts(student, temperature, launch)
    teacher_parts = log_sum_exp_parts(teacher, temperature, launch)
    losses = torch.empty_like(student_parts)
    _divergence_kernel[tuple(losses.shape)](
        student, teacher, student_parts, teacher_parts, gradient, losses, scale, student.shape[1], 1 / temperature,
        SPANS=triton.next_power_of_2(losses.shape[1]), **launch.options(),
    )  # fmt: skip
    return losses


def negative_log_likelihood(
    logits: Tensor, labels: Tensor, gradient: Tensor | None, scale: Tensor, launch: Launch
) -> Tensor:
    """``-log p[label]`` of ``labels [rows]``; writes ``scale * (p - one_hot)`` into ``gradient``.

    Returns: the part of the loss from each span, ``[rows, spans]`` fp32, without ``scale``.
    """
    parts = log_sum_exp_parts(logits, 1.0, launch)
    losses = torch.empty_like(parts)
    _likelihood_kernel[tuple(losses.shape)](
        logits, labels, parts, gradient, losses, scale, logits.shape[1],
        SPANS=triton.next_power_of_2(losses.shape[1]), **launch.options(),
    )  # fmt: skip
    return losses


def multiply_(tensor: Tensor, factor: Tensor) -> Tensor:
    """``tensor *= factor`` in place. If the factor is exactly 1, only the factor is read. The host does not wait."""
    block: Any = 8192
    _multiply_kernel[(math.ceil(tensor.numel() / block),)](tensor, factor, tensor.numel(), BLOCK=block)
    return tensor


@triton.jit
def _log_sum_exp_kernel(logits, parts, vocab, inverse_temperature, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    row, span, spans = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    highest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SPAN, BLOCK):  # lanes are reduced to one value once, after the loop
        columns = span * SPAN + start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + columns, mask=columns < vocab, other=-float("inf")) * inverse_temperature
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    top = tl.max(highest, 0)
    tl.store(parts + row * spans + span, top + tl.log(tl.sum(total * tl.exp(highest - top), 0)))


@triton.jit
def _joined(parts, row, spans, SPANS: tl.constexpr):
    """The log-sum-exp of a whole row, from those of its spans."""
    lanes = tl.arange(0, SPANS)
    part = tl.load(parts + row * spans + lanes, mask=lanes < spans, other=-float("inf"))
    top = tl.max(part, 0)
    return top + tl.log(tl.sum(tl.exp(part - top), 0))


@triton.jit
def _divergence_kernel(
    student, teacher, student_parts, teacher_parts, gradient, losses, scale, vocab, inverse_temperature,
    SPANS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, span, spans = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    student_normaliser = _joined(student_parts, row, spans, SPANS)
    teacher_normaliser = _joined(teacher_parts, row, spans, SPANS)
    factor = tl.load(scale)
    loss = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SPAN, BLOCK):
        columns = span * SPAN + start + tl.arange(0, BLOCK)
        inside = columns < vocab
        at = row * vocab + columns
        s = tl.load(student + at, mask=inside, other=-float("inf"))
        t = tl.load(teacher + at, mask=inside, other=-float("inf"))
        log_p = s * inverse_temperature - student_normaliser
        log_q = t * inverse_temperature - teacher_normaliser
        p, q = tl.exp(log_p), tl.exp(log_q)
        # q log(q/p) + p - q = q (gap + exp(-gap) - 1) is never negative. Near gap = 0 its Taylor series (through
        # gap^6) keeps the digits that the difference of nearly equal probabilities loses.
        gap = tl.where(q > 0, log_q - log_p, 0.0)  # 0 * log 0 = 0
        series = 1 / 2 - gap * (1 / 6 - gap * (1 / 24 - gap * (1 / 120 - gap * (1 / 720))))
        loss += tl.where(tl.abs(gap) < 0.25, q * gap * gap * series, q * gap) + tl.where(
            (tl.abs(gap) < 0.25) & (q > 0), 0.0, p - q
        )
        if gradient is not None:
            tl.store(gradient + at, ((p - q) * factor).to(gradient.dtype.element_ty), mask=inside)
    tl.store(losses + row * spans + span, tl.sum(loss, 0))


@triton.jit
def _likelihood_kernel(
    logits, labels, parts, gradient, losses, scale, vocab,
    SPANS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, span, spans = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    normaliser = _joined(parts, row, spans, SPANS)
    factor = tl.load(scale)
    label = tl.load(labels + row)
    loss = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SPAN, BLOCK):
        columns = span * SPAN + start + tl.arange(0, BLOCK)
        inside = columns < vocab
        at = row * vocab + columns
        log_p = tl.load(logits + at, mask=inside, other=-float("inf")) - normaliser
        loss -= tl.where(columns == label, log_p, 0.0)
        if gradient is not None:
            difference = tl.exp(log_p) - tl.where(columns == label, 1.0, 0.0)
            tl.store(gradient + at, (difference * factor).to(gradient.dtype.element_ty), mask=inside)
    tl.store(losses + row * spans + span, tl.sum(loss, 0))


@triton.jit
def _multiply_kernel(tensor, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(tensor + at, mask=at < count)
        tl.store(tensor + at, (x.to(tl.float32) * by).to(tensor.dtype.element_ty), mask=at < count)
