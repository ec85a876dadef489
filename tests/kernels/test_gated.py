"""The kernel of gated MLPs equals its torch reference, in values and gradients."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.gated import gated_silu, gated_silu_halves, gated_silu_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 700), (0, 8)])  # part of a program, several of them, none
def test_product_and_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, upstream = (4 * torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    results: list[list[Tensor]] = []
    for function, device, each in ((gated_silu_reference, "cpu", torch.float64), (gated_silu, DEVICE, dtype)):
        inputs = [x.to(device, each).requires_grad_() for x in (gate, up)]
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, upstream.to(device, each))
        results.append([tensor.detach().cpu().double() for tensor in (out, *gradients)])
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6  # bf16 has 8 bits, and Triton's interpreter truncates
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 1100])  # part of a program, and more than one
def test_halves_of_rows_are_two_tensors(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    both = (4 * torch.randn(5, 2 * width, generator=generator)).to(DEVICE, dtype).requires_grad_()
    upstream = torch.randn(5, width, generator=generator).to(DEVICE, dtype)
    out, expected = gated_silu_halves(both), gated_silu(*both.chunk(2, dim=1))
    assert torch.equal(out, expected)
    found, wanted = (torch.autograd.grad(each, both, upstream)[0] for each in (out, expected))
    assert torch.equal(found, wanted)


def test_no_rows() -> None:
    rows = torch.empty(0, 8, device=DEVICE).requires_grad_()
    assert torch.autograd.grad(gated_silu_halves(rows).sum(), rows)[0].shape == (0, 8)


def test_columns_of_a_wider_tensor() -> None:
    both = torch.randn(6, 32, device=DEVICE).requires_grad_()
    gate, up = both.chunk(2, dim=-1)
    found = torch.autograd.grad(gated_silu(gate, up).sum(), both)[0]
    torch.testing.assert_close(found, torch.autograd.grad(gated_silu_reference(gate, up).sum(), both)[0])
