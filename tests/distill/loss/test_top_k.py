"""The divergence from k words and a tail: equal at k = V, below it otherwise, by exactly what the docs say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcsd.distill.loss import losses
from fcsd.distill.loss.losses import kl_divergence
from fcsd.distill.loss.top_k import TopK, kl_from_top_k, top_k

TOKENS, HIDDEN, WIDER, VOCAB = 29, 16, 24, 61


def sides(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Student hidden and head, teacher hidden and head, mask."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, TOKENS, HIDDEN), (VOCAB, HIDDEN), (1, TOKENS, WIDER), (VOCAB, WIDER))
    drawn = [(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5).to(dtype) for shape in shapes]
    return *drawn, torch.rand(1, TOKENS, generator=generator) < 0.7  # type: ignore[return-value]


def from_cache(hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, mask: Tensor, k: int, **options):
    same = {name: options[name] for name in ("temperature", "cap") if name in options}
    kept = top_k(teacher[mask], teacher_head, k, chunk_tokens=7, **same)
    return kl_from_top_k(hidden, head, kept, mask, **options)


def softmaxes(hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, mask: Tensor) -> list[Tensor]:
    """Student's and teacher's probabilities ``[kept, vocab]``."""
    return [(x[mask] @ w.T).softmax(-1) for x, w in ((hidden, head), (teacher, teacher_head))]


def buckets(hidden: Tensor, head: Tensor, kept: TopK, mask: Tensor, temperature: float) -> Tensor:
    """``KL_k`` as written, from all logits."""
    p = (hidden[mask] @ head.T / temperature).softmax(-1)
    chosen = torch.zeros_like(p).scatter(1, kept.words.long(), 1.0).bool()
    p_top, p_tail = p.gather(1, kept.words.long()), p.masked_fill(chosen, 0.0).sum(1)
    q_top, q_tail = kept.log_probs.exp(), kept.tail.exp()
    divergence = (q_top * (kept.log_probs - p_top.log())).sum() + (q_tail * (kept.tail - p_tail.log())).sum()
    return divergence * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [1, 5, VOCAB - 1])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
def test_loss_and_gradients_are_the_formulas(temperature: float, k: int, chunk_tokens: int) -> None:
    hidden, head, teacher, teacher_head, mask = sides()
    kept = top_k(teacher[mask], teacher_head, k, temperature=temperature)
    ours, theirs = [(hidden.clone().requires_grad_(), head.clone().requires_grad_()) for _ in range(2)]
    loss = kl_from_top_k(*ours, kept, mask, temperature=temperature, denominator=3, chunk_tokens=chunk_tokens)
    expected = buckets(*theirs, kept, mask, temperature) / 3
    (2 * loss).backward()
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_words_give_the_full_divergence(temperature: float, cap: float | None) -> None:
    hidden, head, teacher, teacher_head, mask = sides()
    ours, theirs = [(hidden.clone().requires_grad_(), head.clone().requires_grad_()) for _ in range(2)]
    loss = from_cache(*ours, teacher, teacher_head, mask, VOCAB, temperature=temperature, cap=cap)
    expected = kl_divergence(*theirs, teacher, teacher_head, mask, temperature=temperature, cap=cap)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, VOCAB), scale=st.sampled_from([0.1, 1.0, 6.0]))
def test_it_is_a_lower_bound_and_never_negative(seed: int, k: int, scale: float) -> None:
    hidden, head, teacher, teacher_head, mask = sides(torch.float32, seed)
    full = kl_divergence(hidden, head * scale, teacher, teacher_head * scale, mask).item()
    bound = from_cache(hidden, head * scale, teacher, teacher_head * scale, mask, k).item()
    assert -1e-6 <= bound <= full * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("k", [1, 4, 20])
def test_what_is_missing_is_the_divergence_inside_the_tail(k: int) -> None:
    hidden, head, teacher, teacher_head, mask = sides()
    p, q = softmaxes(hidden, head, teacher, teacher_head, mask)
    tail = torch.ones_like(q).scatter(1, q.topk(k).indices, 0.0)
    p_tail, q_tail = (x * tail for x in (p, q))
    inside = q_tail * ((q_tail / q_tail.sum(1, True)) / (p_tail / p_tail.sum(1, True))).log()
    missing = torch.where(tail.bool(), inside, 0.0).sum()
    full = kl_divergence(hidden, head, teacher, teacher_head, mask)
    torch.testing.assert_close(full - from_cache(hidden, head, teacher, teacher_head, mask, k), missing)


@pytest.mark.parametrize("k", [1, 4, 20])
def test_the_gradient_is_off_in_the_tail_alone_and_by_no_more_than_twice_its_mass(k: int) -> None:
    """With an identity for a head, hidden states are logits and their gradient is the logits'."""
    logits, teacher = torch.randn(2, 1, TOKENS, VOCAB, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    eye, mask = torch.eye(VOCAB, dtype=torch.float64), torch.ones(1, TOKENS, dtype=torch.bool)
    full, cached = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    kl_divergence(full, eye, teacher, eye, mask).backward()
    from_cache(cached, eye, teacher, eye, mask, k).backward()
    assert full.grad is not None and cached.grad is not None
    bias = (cached.grad - full.grad)[0]
    p, q = softmaxes(logits, eye, teacher, eye, mask)
    tail = torch.ones_like(q).scatter(1, q.topk(k).indices, 0.0)
    p_tail, q_tail = p * tail, q * tail
    torch.testing.assert_close(bias, q_tail - q_tail.sum(1, True) * p_tail / p_tail.sum(1, True))
    assert (bias * (1 - tail)).abs().max() < 1e-12 and bias.sum(1).abs().max() < 1e-12
    assert (bias.abs().sum(1) <= 2 * q_tail.sum(1)).all() and bias.abs().sum() > 0


def test_words_that_are_ruled_out_and_positions_that_do_not_count() -> None:
    hidden, head, _, _, mask = sides(torch.float32)
    hidden = hidden.abs()
    teacher_head = head.clone()
    teacher_head[5:40] = -torch.inf
    for k in (3, 40, VOCAB):  # 40 reaches into the words that are ruled out
        student = hidden.clone().requires_grad_()
        loss = from_cache(student, head, hidden, teacher_head, mask, k)
        loss.backward()
        assert loss.isfinite() and loss.item() > 0
        assert student.grad is not None and student.grad.isfinite().all()
    nothing = torch.zeros_like(mask)
    empty = TopK(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.int32), torch.empty(0))
    assert kl_from_top_k(hidden, head, empty, nothing).item() == 0.0


def test_equal_models_have_no_divergence_with_a_large_vocabulary_in_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    head = (torch.randn(150_000, 32, generator=generator) * 0.5).bfloat16()
    teacher = torch.randn(1, 8, 32, generator=generator).bfloat16()
    student = (teacher.float() + 0.01 * torch.randn(1, 8, 32, generator=generator)).bfloat16()
    mask = torch.ones(1, 8, dtype=torch.bool)
    assert abs(from_cache(teacher, head, teacher, head, mask, 64).item()) < 1e-6
    full = kl_divergence(student, head, teacher, head, mask).item()
    assert 0 < from_cache(student, head, teacher, head, mask, 64).item() < full


def test_logits_are_never_held_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from fcsd.distill.loss import top_k as module

    sizes = []
    product = losses.logits_of

    def watched(hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
        sizes.append(len(hidden))
        return product(hidden, weight, cap)

    monkeypatch.setattr(losses, "logits_of", watched)
    monkeypatch.setattr(module, "logits_of", watched)
    hidden, head, teacher, teacher_head, mask = sides()
    from_cache(hidden, head, teacher, teacher_head, mask, 4, chunk_tokens=8)
    assert max(sizes) == 8 and sum(sizes) == 2 * int(mask.sum())
