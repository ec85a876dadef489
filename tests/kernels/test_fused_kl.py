"""The fused losses (compiled on a GPU, else in Triton's interpreter) against the torch losses on the CPU."""

from functools import partial
from typing import Any

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.distill.loss import losses
from fcsd.kernels import fused_kl
from fcsd.kernels.fused_kl import LAUNCH
from fcsd.kernels.vocabulary import Launch

# The interpreter is numpy, which reports what lanes outside the vocabulary compute.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")

TOKENS, HIDDEN, WIDER, VOCAB = 7, 16, 24, 301
SMALL = Launch(block=32, span=64)  # five spans, the last with a ragged block


def sides(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student hidden and head, teacher hidden and head: heads of unlike width over one vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw(1, TOKENS, HIDDEN), draw(VOCAB, HIDDEN), draw(1, TOKENS, WIDER), draw(VOCAB, WIDER)


def some(count: int = TOKENS) -> Tensor:
    return torch.rand(1, count, generator=torch.Generator().manual_seed(3)) < 0.6


def fused(name: str, *arguments: Tensor, **options) -> Tensor:
    """The loss from ``DEVICE``; gradients reach ``arguments`` wherever they are."""
    return getattr(fused_kl, name)(*(x.to(DEVICE) for x in arguments), **{"launch": SMALL, **options}).cpu()


def both(name: str, student: tuple[Tensor, Tensor], *rest: Tensor, **options) -> None:
    """Loss and gradients of the torch and the fused ``name`` are the same to rounding.

    A sum whose terms cancel keeps the rounding of its terms, so the absolute tolerance follows the largest value.
    """
    results = []
    for function in (getattr(losses, name), partial(fused, name)):
        hidden, head = (x.clone().requires_grad_() for x in student)
        loss = function(hidden, head, *rest, **options)
        (3 * loss).backward()
        results.append((loss.detach(), hidden.grad, head.grad))
    rounding = 2e-5 if student[0].dtype == torch.float32 else 2**-7
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(
            found, expected, rtol=rounding, atol=rounding * max(0.1, expected.abs().max().item())
        )


# Every two of the settings meet each day, all three at night.
PAIRS = [(1.0, 1, False), (2.5, 1, True), (1.0, 4, True), (2.5, 4, False), (1.0, 1000, False), (2.5, 1000, True)]
OTHERS = [(temperature, chunk, not everything) for temperature, chunk, everything in PAIRS]


@pytest.mark.parametrize(
    ("temperature", "chunk_tokens", "everything"),
    [*PAIRS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in OTHERS)],
)
def test_kl_equals_torch(temperature: float, chunk_tokens: int, everything: bool) -> None:
    hidden, head, *teacher = sides()
    mask = some() | everything
    options = {"temperature": temperature, "chunk_tokens": chunk_tokens, "denominator": mask.sum()}
    both("kl_divergence", (hidden, head), *teacher, mask, **options)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
def test_cross_entropy_equals_torch(chunk_tokens: int) -> None:
    hidden, head, _, _ = sides()
    labels = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    for ignored in (~some(), torch.zeros_like(some())):
        both("cross_entropy", (hidden, head), labels.masked_fill(ignored, losses.IGNORE), chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("name", ["kl_divergence", "cross_entropy"])
@pytest.mark.parametrize("function", [losses, fused_kl], ids=["torch", "fused"])
def test_all_positions_may_be_computed_if_those_that_do_not_count_are_zero(name: str, function: Any) -> None:
    hidden, head, teacher_hidden, teacher_head = (x.to(DEVICE) for x in sides())
    labels = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    counts = some().to(DEVICE)
    labels = labels.masked_fill(~counts, losses.IGNORE)
    results = []
    for everywhere in (False, True):
        ours, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        student, teacher, kept = ours, teacher_hidden, counts.flatten().nonzero().squeeze(1)
        if everywhere:
            student, teacher = (x.masked_fill(~counts.unsqueeze(-1), 0.0) for x in (ours, teacher_hidden))
            kept = torch.arange(TOKENS, device=DEVICE)
        rest: Any = (teacher, teacher_head, counts) if name == "kl_divergence" else (labels,)
        loss = getattr(function, name)(student, weight, *rest, denominator=counts.sum(), chunk_tokens=4, kept=kept)
        (3 * loss).backward()
        results.append((loss.detach(), ours.grad, weight.grad))
    for found, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_operands_equal_torch() -> None:
    hidden, head, *teacher = sides(torch.bfloat16)
    both("kl_divergence", (hidden, head), *teacher, some())


@pytest.mark.parametrize("vocab", [1, 31, 64, 65])
def test_any_vocabulary(vocab: int) -> None:
    hidden, head, teacher_hidden, teacher_head = sides()
    both("kl_divergence", (hidden, head[:vocab]), teacher_hidden, teacher_head[:vocab], some())


def test_an_empty_mask_and_a_single_token() -> None:
    hidden, head, teacher_hidden, teacher_head = sides()
    nothing = torch.zeros(1, TOKENS, dtype=torch.bool)
    both("kl_divergence", (hidden, head), teacher_hidden, teacher_head, nothing)
    both("cross_entropy", (hidden, head), torch.full((1, TOKENS), losses.IGNORE))
    both("kl_divergence", (hidden[:, :1], head), teacher_hidden[:, :1], teacher_head, ~nothing[:, :1])


def test_only_the_student_gets_gradients_and_a_frozen_head_none() -> None:
    hidden, head, teacher_hidden, teacher_head = sides()
    inputs = [hidden.requires_grad_(), head, teacher_hidden.requires_grad_(), teacher_head.requires_grad_()]
    loss = fused("kl_divergence", *inputs, some())
    loss.backward()
    assert [x.grad is not None for x in inputs] == [True, False, False, False]
    with torch.no_grad():
        unrecorded = fused("kl_divergence", *inputs, some())
    assert not unrecorded.requires_grad and unrecorded == loss


def test_a_frozen_body_still_trains_the_head() -> None:
    hidden, head, *teacher = sides()
    head.requires_grad_()
    fused("kl_divergence", hidden, head, *teacher, some()).backward()
    expected = head.detach().clone().requires_grad_()
    losses.kl_divergence(hidden, expected, *teacher, some()).backward()
    torch.testing.assert_close(head.grad, expected.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_have_no_divergence(dtype: torch.dtype) -> None:
    hidden, head, _, _ = sides(dtype)
    hidden.requires_grad_()
    loss = fused("kl_divergence", hidden, head, hidden, head, some(), temperature=1.7)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and hidden.grad.count_nonzero() == 0


def test_words_that_are_ruled_out_are_finite() -> None:
    hidden, head, _, _ = sides()
    hidden = hidden.abs()  # positive, so that a head row of -inf gives a logit of -inf
    for student_too in (False, True):
        student_head, teacher_head = head.clone(), head.clone()
        teacher_head[64:130] = -torch.inf  # a whole span, a block and part of a block
        if student_too:
            student_head[64:130] = -torch.inf
        student = hidden.clone().requires_grad_()
        loss = fused("kl_divergence", student, student_head, hidden, teacher_head, some())
        assert loss.isfinite()
        torch.testing.assert_close(
            loss, losses.kl_divergence(hidden, student_head, hidden, teacher_head, some()), rtol=2e-5, atol=2e-6
        )


def test_far_apart_models_stay_finite() -> None:
    hidden, head, *teacher = sides()
    both("kl_divergence", (hidden, head * 40), *teacher, some())


def test_sign_and_size_near_alignment_with_a_large_vocabulary_in_bf16() -> None:
    vocab, width, tokens = 150_000, 32, 3
    generator = torch.Generator().manual_seed(0)
    head = (torch.randn(vocab, width, generator=generator) * 0.5).bfloat16()
    teacher = torch.randn(tokens, width, generator=generator).bfloat16()
    student = (teacher.float() + 0.01 * torch.randn(tokens, width, generator=generator)).bfloat16()
    log_p = (student.double() @ head.double().T).log_softmax(-1)
    log_q = (teacher.double() @ head.double().T).log_softmax(-1)
    expected = (log_q.exp() * (log_q - log_p)).sum().item()
    assert 0 < expected < 0.01
    mask = torch.ones(tokens, dtype=torch.bool)
    loss = fused("kl_divergence", student, head, teacher, head, mask, launch=LAUNCH)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_gradients_are_handed_out_once() -> None:
    hidden, head, *teacher = sides()
    loss = fused("kl_divergence", hidden.requires_grad_(), head, *teacher, some())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already handed out"):
        loss.backward()
