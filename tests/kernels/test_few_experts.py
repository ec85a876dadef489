"""Routed experts of few tokens by Triton kernels equal their torch reference."""

from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.few_experts import few_experts, few_experts_reference


def draw(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Tokens, the experts that they chose, the weights of these, and the experts' matrices."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=generator) / inner**0.5
    return x.to(DEVICE, dtype), chosen.to(DEVICE), weights.to(DEVICE), gate_up.to(DEVICE, dtype), down.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "inner"),
    [(1, 2, 8, 64, 32), (5, 2, 4, 80, 40), (40, 2, 3, 48, 24), (3, 1, 5, 200, 130)],
)
def test_they_are_the_reference(tokens: int, top_k: int, experts: int, hidden: int, inner: int) -> None:
    given = draw(tokens, top_k, experts, hidden, inner)
    expected = few_experts_reference(*(x.double() if x.is_floating_point() else x for x in given))
    torch.testing.assert_close(few_experts(*given).double(), expected, rtol=1e-5, atol=1e-5)


def test_one_expert_may_get_all_tokens() -> None:
    x, chosen, *rest = draw(40, 1, 4, 64, 32)
    chosen = torch.full_like(chosen, 2)
    torch.testing.assert_close(few_experts(x, chosen, *rest), few_experts_reference(x, chosen, *rest))


@pytest.fixture
def undefined_is_nan() -> Iterator[None]:
    """Memory that is allocated without a value holds NaN, so that nothing can be read from it unnoticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def test_experts_of_other_ranks_add_nothing(undefined_is_nan: None) -> None:
    x, chosen, weights, *matrices = draw(6, 2, 4, 64, 32)
    elsewhere = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.4
    assert elsewhere.any() and not elsewhere.all()
    found = few_experts(x, chosen.masked_fill(elsewhere, 4), weights, *matrices)
    expected = few_experts_reference(x, chosen, weights.masked_fill(elsewhere, 0), *matrices)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
def test_halves_are_as_exact_as_torch(tokens: int) -> None:
    given = draw(tokens, 6, 64, 2048, 1408, torch.bfloat16)
    exact = few_experts_reference(*(x.double() if x.is_floating_point() else x for x in given))
    found, by_torch = few_experts(*given), few_experts_reference(*given)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() <= 1.1 * (by_torch - exact).norm()
