"""The terms of the distillation loss, computed from hidden states and output heads, one chunk of tokens at a time.

The logits ``[tokens, vocab]`` are never held in full. The forward pass computes the logits of a chunk, the chunk's loss
and the gradient of the loss with respect to these logits. It multiplies this gradient by the head before the next chunk
follows, so the backward pass recomputes nothing. Softmax, divergence and sums are computed in fp32 for any inputs (in
fp64 for fp64 inputs). In bf16, the divergence of two nearly equal distributions can get the wrong sign.

Every loss is a sum over the positions where ``mask`` is true, divided by ``denominator``. The caller passes
``max(1, unmasked positions of the whole global batch)`` for a token mean, or 1 for the plain sum of FarSkip's
equations 3 to 5, so that neither accumulation nor the number of ranks changes the gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.config import Objective

IGNORE = -100  # label of a position that predicts nothing

# (logits [chunk, vocab], rows of the chunk) -> the summed loss of the chunk, and its gradient at the logits
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


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
    cap: float | None = None,
) -> Tensor:
    """KL(teacher ‖ student) of the next-token distributions (FarSkip eq. 4).

    Args:
        student_hidden, teacher_hidden: ``[..., hidden]`` after the final norm. The two widths may differ.
        student_head, teacher_head: ``[vocab, hidden]`` output weights.
        mask: ``[...]`` bool, true where the position counts.
        temperature: softens both distributions. The loss is scaled by its square (Hinton et al. 2015, §2).
        denominator: the number by which the sum over positions is divided.
        chunk_tokens: the number of positions whose logits are computed at a time.
        kept: ``[counted]`` int64, the positions in the flattened ``mask`` that count, if the caller knows them.
            Otherwise they are computed here, and on a GPU the host then waits for the device.
        cap: both models' logits are ``cap * tanh(logits / cap)``; None if they cap nothing. The kernels cap nothing.

    Returns: an fp32 scalar with gradients to ``student_hidden`` and, if it requires them, ``student_head``.
    """
    if _fuses(student_head) and cap is None:
        from fcsd.kernels import fused_kl

        given = (student_hidden, student_head, teacher_hidden, teacher_head, mask)
        how: Any = {"temperature": temperature, "denominator": denominator}
        return fused_kl.kl_divergence(*given, chunk_tokens=chunk_tokens, kept=kept, **how)
    keep = mask.flatten().nonzero().squeeze(1) if kept is None else kept
    teacher_rows = teacher_hidden.detach().flatten(0, -2)[keep]
    teacher_weight = for_matmul(teacher_head.detach())

    def chunk_loss(student_logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_p = (student_logits / temperature).log_softmax(-1)
        log_q = (logits_of(teacher_rows[rows], teacher_weight, cap) / temperature).log_softmax(-1)
        q = log_q.exp()
        gap = log_q.sub_(log_p).masked_fill_(q == 0, 0.0)  # 0 * log 0 = 0
        divergence = gap.mul_(q).sum()
        difference = log_p.exp_().sub_(q)
        # The sum of p - q is 0 except for the rounding errors of the two softmax normalisers. Adding it removes these
        # errors from the divergence: each addend q log(q/p) + p - q is non-negative by itself.
        return (divergence + difference.sum()) * temperature**2, difference.mul_(temperature)

    return chunked(student_hidden.flatten(0, -2)[keep], student_head, chunk_loss, chunk_tokens, cap) / denominator


def cross_entropy(
    student_hidden: Tensor,
    student_head: Tensor,
    labels: Tensor,
    *,
    denominator: float | Tensor = 1.0,
    chunk_tokens: int = 512,
    kept: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Negative log-likelihood of the data (FarSkip eq. 3).

    Args:
        student_hidden: ``[..., hidden]`` after the final norm.
        student_head: ``[vocab, hidden]`` output weight.
        labels: ``[...]`` int64, already shifted: the token that each position predicts, or ``IGNORE``.
        denominator, chunk_tokens, kept, cap: as in ``kl_divergence``.

    Returns: an fp32 scalar with gradients to ``student_hidden`` and, if it requires them, ``student_head``.
    """
    if _fuses(student_head) and cap is None:
        from fcsd.kernels import fused_kl

        return fused_kl.cross_entropy(
            student_hidden, student_head, labels, denominator=denominator, chunk_tokens=chunk_tokens, kept=kept
        )
    labels = labels.flatten()
    keep = (labels != IGNORE).nonzero().squeeze(1) if kept is None else kept
    uncounted = (labels[keep] == IGNORE).unsqueeze(1)
    targets = labels[keep].unsqueeze(1).masked_fill(uncounted, 0)

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1)
        loss = -log_p.gather(1, targets[rows]).masked_fill(uncounted[rows], 0.0).sum()
        gradient = log_p.exp_()
        return loss, gradient.scatter_add_(1, targets[rows], -torch.ones_like(gradient[:, :1]))

    return chunked(student_hidden.flatten(0, -2)[keep], student_head, chunk_loss, chunk_tokens, cap) / denominator


def squared_distance(student: Tensor, teacher: Tensor, mask: Tensor, *, denominator: float | Tensor = 1.0) -> Tensor:
    """The squared distance ``‖o - t‖²`` of one layer's full streams, summed over hidden units and positions.

    This is FarSkip eq. 5. Only the difference is kept for the backward pass, in the student's dtype.

    Args:
        student, teacher: ``[..., hidden]`` after the same layer, before any norm.
        mask: ``[...]`` bool, true where the position counts.

    Returns: an fp32 scalar with a gradient to ``student``.
    """
    return _SquaredDistance.apply(student, teacher.detach(), mask) / denominator  # type: ignore[operator]


class _SquaredDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        accurate = torch.promote_types(student.dtype, torch.float32)
        difference = torch.where(mask.unsqueeze(-1), student.to(accurate) - teacher.to(accurate), 0.0)
        ctx.save_for_backward(difference.to(student.dtype))
        return difference.square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * (2 * upstream).to(difference.dtype), None, None


def _fuses(head: Tensor) -> bool:
    """Whether the Triton kernels of ``fcsd.kernels`` support these weights. This file is their reference."""
    return head.is_cuda and head.dtype != torch.float64


def chunked(hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_tokens: int, cap: float | None = None) -> Tensor:
    """The sum of ``chunk_loss`` over all chunks of the rows of ``hidden`` ``[tokens, hidden]``.

    The logits that ``chunk_loss`` gets are capped by ``cap``, and so are those at which it gives the gradient.
    """
    return _ChunkedHeadLoss.apply(hidden, head, chunk_loss, chunk_tokens, torch.is_grad_enabled(), cap)  # type: ignore[return-value]


class _ChunkedHeadLoss(torch.autograd.Function):
    """Computes the loss and its gradients in one pass over the chunks. The backward pass only scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        chunk_loss: ChunkLoss,
        chunk_tokens: int,
        training: bool,
        cap: float | None,
    ) -> Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=accurate)
        to_hidden = torch.empty_like(hidden) if training and ctx.needs_input_grad[0] else None
        to_head = torch.zeros_like(head, dtype=accurate) if training and ctx.needs_input_grad[1] else None
        weight = for_matmul(head)
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = logits_of(hidden[rows], weight, cap)
            loss, gradient = chunk_loss(logits, rows)
            if cap is not None:
                gradient = gradient * (1 - (logits / cap).square())  # the slope of the cap: 1 - tanh²
            total += loss
            gradient = gradient.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[rows] = gradient @ weight
            if to_head is not None:
                to_head += _product(gradient.t(), hidden[rows].to(weight.dtype))
        ctx.save_for_backward(to_hidden, None if to_head is None else to_head.to(head.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_head = ctx.saved_tensors
        scaled = [None if g is None else g * upstream.to(g.dtype) for g in (to_hidden, to_head)]
        return (*scaled, None, None, None, None)


def for_matmul(head: Tensor) -> Tensor:
    """The head as an operand of matrix products that sum in fp32.

    On a GPU it stays as it is, because tensor cores sum bf16 operands in fp32. On a CPU it is converted to fp32, or
    stays fp64.
    """
    return head if head.is_cuda else head.to(torch.promote_types(head.dtype, torch.float32))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` with an fp32 result, also for half-precision operands on a GPU."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def logits_of(hidden: Tensor, weight: Tensor, cap: float | None = None) -> Tensor:
    """The logits ``[tokens, vocab]`` of ``hidden`` ``[tokens, hidden]``, in fp32 or fp64, capped by ``cap``."""
    logits = _product(hidden.to(weight.dtype), weight.t())
    return logits if cap is None else cap * torch.tanh(logits / cap)


class Given(NamedTuple):
    """What a term is computed from on one micro-batch.

    Attributes:
        labels: ``[batch, seq]`` int64, already shifted: the token that each position predicts, or ``IGNORE``.
        how: the keyword arguments ``denominator``, ``chunk_tokens``, ``kept`` and ``cap`` of ``kl_divergence``.
        student: its hidden states ``[batch, seq, hidden]`` after the final norm, and its head ``[vocab, hidden]``.
        streams: as in ``targets``, but the student's.
        targets: the ``Targets`` of ``fcsd.distill.teacher``; None if no term needs a teacher.
    """

    objective: Objective
    labels: Tensor
    how: dict[str, Any]
    student: tuple[Tensor, Tensor]
    streams: dict[int, Tensor]
    targets: Any

    @property
    def counts(self) -> Tensor:
        """``[batch, seq]`` bool, true where the position counts."""
        return self.labels != IGNORE


def _hidden(given: Given) -> Tensor:
    """The sum of the squared distances of all compared layers."""
    # The streams are removed from the dicts one by one, so that both streams of a layer are freed as soon as only their
    # difference is kept for backward.
    ours, theirs, how = given.streams, given.targets.streams, {"denominator": given.how["denominator"]}
    distances = [squared_distance(ours.pop(k), theirs.pop(k), given.counts, **how) for k in tuple(theirs)]
    return torch.stack(distances).sum()


def _kl(given: Given) -> Tensor:
    (hidden, head), how = given.targets.output, {**given.how, "temperature": given.objective.temperature}
    return kl_divergence(*given.student, hidden, head, given.counts, **how)


def _sft(given: Given) -> Tensor:
    return cross_entropy(*given.student, given.labels, **given.how)


# The function of each term of the table ``fcsd.config.TERMS``, in the order in which they run: streams are freed before
# logits take memory.
COMPUTED: dict[str, Callable[[Given], Tensor]] = {"hidden": _hidden, "kl": _kl, "sft": _sft}


def loss_terms(
    objective: Objective,
    batch: dict[str, Tensor],
    student: tuple[Tensor, Tensor],
    targets: Any,
    denominator: Tensor,
    terms: tuple[str, ...],
    streams: dict[int, Tensor] | None = None,
    cap: float | None = None,
) -> dict[str, Tensor]:
    """The loss terms named in ``terms``, unweighted, as fp32 scalars; see ``Student.forward`` and ``Given``."""
    chunk = objective.chunk(len(student[1]))
    how = {"denominator": denominator, "chunk_tokens": chunk, "kept": batch.get("kept"), "cap": cap}
    given = Given(objective, batch["labels"], how, student, streams or {}, targets)
    return {name: compute(given) for name, compute in COMPUTED.items() if name in terms}
