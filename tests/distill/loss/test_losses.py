"""The losses against full-logit float64, and where bf16, infinities and empty masks break naive ones."""

import pytest
import torch
from torch import Tensor

from fcsd.distill.loss.losses import IGNORE, cross_entropy, kl_divergence

TOKENS, HIDDEN, WIDER, VOCAB = 37, 16, 24, 61


def sides(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student hidden and head, teacher hidden and head: heads of unlike width over one vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw(1, TOKENS, HIDDEN), draw(VOCAB, HIDDEN), draw(1, TOKENS, WIDER), draw(VOCAB, WIDER)


def some(seed: int = 3) -> Tensor:
    return torch.rand(1, TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.6


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * (logits / cap).tanh()


def full_kl(hidden, head, teacher_hidden, teacher_head, mask, temperature: float, cap: float | None = None) -> Tensor:
    """Equation 4 as written, every logit in float64."""
    log_p = (capped(hidden.double() @ head.double().T, cap) / temperature).log_softmax(-1)
    log_q = (capped(teacher_hidden.double() @ teacher_head.double().T, cap) / temperature).log_softmax(-1)
    return ((log_q.exp() * (log_q - log_p)).sum(-1) * mask).sum() * temperature**2


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
def test_kl_and_gradients_equal_full_logits(temperature: float, chunk_tokens: int, cap: float | None) -> None:
    hidden, head, teacher_hidden, teacher_head = sides(torch.float64)
    mask = some()
    ours, theirs = [(hidden.clone().requires_grad_(), head.clone().requires_grad_()) for _ in range(2)]
    how = {"temperature": temperature, "chunk_tokens": chunk_tokens, "cap": cap}
    loss = kl_divergence(*ours, teacher_hidden, teacher_head, mask, **how)
    expected = full_kl(*theirs, teacher_hidden, teacher_head, mask, temperature, cap)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
def test_cross_entropy_and_gradients_equal_full_logits(chunk_tokens: int, cap: float | None) -> None:
    hidden, head, _, _ = sides(torch.float64)
    labels = torch.randint(VOCAB, (1, TOKENS)).masked_fill(~some(), IGNORE)
    ours, theirs = [(hidden.clone().requires_grad_(), head.clone().requires_grad_()) for _ in range(2)]
    loss = cross_entropy(*ours, labels, chunk_tokens=chunk_tokens, cap=cap)
    logits = capped(theirs[0] @ theirs[1].T, cap).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs])


def test_only_the_student_gets_gradients_and_a_frozen_head_none() -> None:
    hidden, head, teacher_hidden, teacher_head = sides()
    inputs = [hidden.requires_grad_(), head, teacher_hidden.requires_grad_(), teacher_head.requires_grad_()]
    kl_divergence(*inputs, some()).backward()
    assert [x.grad is not None for x in inputs] == [True, False, False, False]
    with torch.no_grad():
        assert not kl_divergence(*inputs, some()).requires_grad


def test_denominator_makes_parts_add_up_to_the_whole() -> None:
    hidden, head, teacher_hidden, teacher_head = sides(torch.float64)
    mask = some()
    whole = kl_divergence(hidden, head, teacher_hidden, teacher_head, mask, denominator=int(mask.sum()))
    parts = sum(
        kl_divergence(
            hidden[:, part],
            head,
            teacher_hidden[:, part],
            teacher_head,
            mask[:, part],
            denominator=mask.sum(),
        )
        for part in (slice(0, 5), slice(5, 30), slice(30, None))
    )
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_have_no_divergence(dtype: torch.dtype) -> None:
    hidden, head, _, _ = sides(dtype)
    hidden.requires_grad_()
    loss = kl_divergence(hidden, head, hidden, head, some())
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and hidden.grad.count_nonzero() == 0


@pytest.mark.parametrize("seed", range(20))
def test_kl_is_never_negative(seed: int) -> None:
    hidden, head, _, _ = sides(seed=seed)
    nudged = hidden * (1 + 1e-4 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed)))
    assert kl_divergence(nudged, head * 5, hidden, head * 5, some()).item() >= -1e-6


def test_sign_and_size_near_alignment_with_a_large_vocabulary_in_bf16() -> None:
    vocab, width = 150_000, 32
    generator = torch.Generator().manual_seed(0)
    head = (torch.randn(vocab, width, generator=generator) * 0.5).bfloat16()
    teacher = torch.randn(8, width, generator=generator).bfloat16()
    student = (teacher.float() + 0.01 * torch.randn(8, width, generator=generator)).bfloat16()
    mask = torch.ones(8, dtype=torch.bool)
    expected = full_kl(student, head, teacher, head, mask, 1.0).item()
    assert 0 < expected < 0.01
    assert kl_divergence(student, head, teacher, head, mask).item() == pytest.approx(expected, rel=1e-3)


def test_words_the_teacher_rules_out_are_finite_in_both_directions() -> None:
    hidden, head, _, _ = sides()
    hidden = hidden.abs().requires_grad_()  # positive, so that a head row of -inf gives a logit of -inf
    for student_too in (False, True):
        teacher_head, student_head = head.clone(), head.clone()
        teacher_head[5] = -torch.inf
        if student_too:
            student_head[5] = -torch.inf
        loss = kl_divergence(hidden, student_head, hidden, teacher_head, some())
        assert torch.isfinite(loss)
        assert loss.item() == 0.0 if student_too else loss.item() > 0


def test_an_empty_mask_and_a_single_token() -> None:
    hidden, head, teacher_hidden, teacher_head = sides()
    hidden.requires_grad_()
    nothing = torch.zeros(1, TOKENS, dtype=torch.bool)
    loss = kl_divergence(hidden, head, teacher_hidden, teacher_head, nothing, denominator=1)
    loss = loss + cross_entropy(hidden, head, torch.full((1, TOKENS), IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None and hidden.grad.count_nonzero() == 0
    one = [x[:, :1] if x.dim() == 3 else x for x in (hidden, head, teacher_hidden, teacher_head)]
    assert torch.isfinite(kl_divergence(*one, torch.ones(1, 1, dtype=torch.bool)))


def test_logits_are_never_held_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from fcsd.distill.loss import losses

    sizes = []
    product = losses.logits_of

    def watched(hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
        sizes.append(len(hidden))
        return product(hidden, weight, cap)

    monkeypatch.setattr(losses, "logits_of", watched)
    hidden, head, teacher_hidden, teacher_head = sides()
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    kl_divergence(hidden, head, teacher_hidden, teacher_head, mask, chunk_tokens=8)
    assert max(sizes) == 8 and sum(sizes) == 2 * TOKENS


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 300])
def test_bf16_on_a_gpu_is_close_to_float64(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((tokens, 64), (5000, 64), (tokens, 64), (5000, 64))]
    hidden, head, teacher_hidden, teacher_head = (x.bfloat16().cuda() for x in drawn)
    mask = torch.ones(tokens, dtype=torch.bool, device="cuda")
    ours, theirs = [(hidden.clone().requires_grad_(), head.clone().requires_grad_()) for _ in range(2)]
    loss = kl_divergence(*ours, teacher_hidden, teacher_head, mask, chunk_tokens=128)
    expected = full_kl(*theirs, teacher_hidden, teacher_head, mask, 1.0)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad, y.grad, rtol=2e-2, atol=2e-2 * y.grad.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_the_caller_knows_change_no_bit(dtype: torch.dtype) -> None:
    hidden, head, teacher_hidden, teacher_head = sides(dtype)
    mask = some()
    labels = torch.randint(VOCAB, (1, TOKENS)).masked_fill(~mask, IGNORE)
    kept = mask.flatten().nonzero().squeeze(1)

    def both(kept: Tensor | None) -> list[Tensor]:
        ours = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        loss = kl_divergence(*ours, teacher_hidden, teacher_head, mask, kept=kept)
        (loss + cross_entropy(*ours, labels, kept=kept)).backward()
        return [loss, *(x.grad for x in ours if x.grad is not None)]

    assert all(torch.equal(one, other) for one, other in zip(both(kept), both(None), strict=True))
