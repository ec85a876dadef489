"""The kernels that move rows equal their torch reference, in values and gradients."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels import rows as kernels
from fcsd.kernels import rows_reference
from fcsd.kernels.rows import permute, row_numbers, unpermute

TOKENS = 7


def draw(dtype: torch.dtype, top_k: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, rows, fp32 weights, and the order of the rows among (token, choice) pairs."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, width, generator=generator).to(dtype)
    rows = torch.randn(TOKENS * top_k, width, generator=generator).to(dtype)
    weight = torch.rand(TOKENS, top_k, generator=generator)
    return tokens, rows, weight, torch.randperm(TOKENS * top_k, generator=generator)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k, width", [(1, 16), (3, 40), (8, 1100)])  # one block, a ragged one, two of them
@pytest.mark.parametrize("move", ["permute", "unpermute"])
def test_rows_and_gradients_are_those_of_torch(move, top_k, width, dtype, weighted):
    tokens, rows, weights, order = draw(dtype, top_k, width)
    row_of = row_numbers(order, top_k)
    assert torch.equal(row_of.flatten()[order], torch.arange(len(order)))
    given, upstream = (tokens, rows) if move == "permute" else (rows, tokens)
    by_torch = rows_reference.permute if move == "permute" else rows_reference.unpermute
    by_kernel = permute if move == "permute" else unpermute
    results = []
    for device, each in (("cpu", torch.float32), (DEVICE, dtype)):  # bf16 is held against fp32 sums
        x = given.to(device, each, copy=True).requires_grad_()
        weight = weights.to(device, copy=True).requires_grad_() if weighted else None
        out = by_kernel(x, weight, row_of.to(device)) if results else by_torch(x, weight, order, top_k)
        out.backward(upstream.to(device, each))
        found = (out.detach(), x.grad, *([] if weight is None else [weight.grad]))
        assert all(tensor is not None for tensor in found)
        results.append([tensor.cpu().float() for tensor in found if tensor is not None])
    if move == "permute" and (not weighted or dtype == torch.float32):
        assert torch.equal(results[1][0], results[0][0].to(dtype).float())
    rounding = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter cuts bf16 off where a GPU rounds
    torch.testing.assert_close(results[1], results[0], rtol=rounding, atol=1e-5)


def test_a_gradient_that_is_not_contiguous_and_rows_that_need_none():
    tokens, _, weights, order = draw(torch.float32, 2, 16)
    row_of = row_numbers(order, 2).to(DEVICE)
    x = tokens.to(DEVICE).requires_grad_()
    out = unpermute(permute(x, None, row_of), weights.to(DEVICE), row_of)
    out.sum().backward()  # the gradient is one number, expanded
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), weights.sum(dim=1, keepdim=True).expand_as(tokens))


@pytest.mark.parametrize("weighted", [False, True])
def test_tokens_may_have_fewer_rows_and_rows_may_be_part_of_records(weighted):
    generator = torch.Generator().manual_seed(0)
    row_of = torch.tensor([[2, -1], [0, 1], [-1, -1], [3, -1]])
    tokens, rows = (torch.randn(4, 40, generator=generator) for _ in range(2))
    weight = torch.rand(4, 2, generator=generator) if weighted else None
    results = []
    for by, device in ((rows_reference, "cpu"), (kernels, DEVICE)):
        place, factors = row_of.to(device), None if weight is None else weight.to(device)
        given = torch.cat([rows, torch.full((4, 8), float("nan"))], dim=1).to(device)[:, :40]
        sums, spread = torch.full((4, 40), 7.0, device=device), torch.full((4, 48), 7.0, device=device)
        by.collect(given, factors, place, sums)
        by.spread(tokens.to(device), factors, place, spread[:, :40])
        results.append([sums.cpu(), spread.cpu(), by.dots(tokens.to(device), given, place).cpu()])
    assert all(torch.equal(found, expected) for found, expected in zip(results[1][:2], results[0], strict=False))
    torch.testing.assert_close(results[1][2], results[0][2])  # added in another order
    sums, spread, dots = results[0]
    factor = torch.ones(4, 2) if weight is None else weight
    torch.testing.assert_close(sums[1], factor[1, 0] * rows[0] + factor[1, 1] * rows[1])
    torch.testing.assert_close(spread[2, :40], factor[0, 0] * tokens[0])
    assert not sums[2].any() and (spread[:, 40:] == 7.0).all()
    assert dots[0, 1] == 0 and dots[3, 0] == pytest.approx(float(tokens[3] @ rows[3]), rel=1e-5)
