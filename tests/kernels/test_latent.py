"""The kernels of latent attention's keys equal their torch reference, in values and gradients."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.latent import expand, expand_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "seq", "own", "rotated", "value"),
    [(2, 3, 4, 16, 8, 16), (1, 40, 2, 256, 64, 24), (2, 4, 0, 16, 8, 16)],  # ragged, more than a program holds, none
)
def test_keys_values_and_gradients_are_those_of_torch(
    batch: int, heads: int, seq: int, own: int, rotated: int, value: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(batch, seq, heads, own + value, generator=generator).to(dtype)
    shared = torch.randn(batch, 1, seq, rotated + 3, generator=generator).to(dtype)[..., :rotated]
    # Attention gives gradients in an order of its own.
    upstream = [
        torch.randn(batch, heads, seq, width, generator=generator).to(dtype) for width in (own + rotated, value)
    ]
    results: list[list[Tensor]] = []
    for function, device, each in ((expand_reference, "cpu", torch.float64), (expand, DEVICE, dtype)):
        inputs = [x.to(device, each).requires_grad_() for x in (projected, shared)]
        out = function(*inputs, own)
        gradients = torch.autograd.grad(out, inputs, [x.to(device, each) for x in upstream])
        results.append([x.detach().cpu().double() for x in (*out, *gradients)])
    exact, found = results
    for at in range(3):  # copies
        assert torch.equal(found[at], exact[at])
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5  # bf16 has 8 bits, and Triton's interpreter truncates
    torch.testing.assert_close(found[3], exact[3], rtol=rounding, atol=rounding)


def test_keys_lie_in_memory_token_by_token_and_values_are_not_copied() -> None:
    projected, shared = torch.randn(2, 5, 3, 24, device=DEVICE), torch.randn(2, 1, 5, 8, device=DEVICE)
    keys, values = expand(projected, shared, 16)
    assert keys.transpose(1, 2).is_contiguous()
    assert values.data_ptr() == projected[..., 16:].data_ptr()
