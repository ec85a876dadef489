"""The kernel of AdamW equals its torch reference, and the reference equals torch's AdamW on fp32 weights."""

import pytest
import torch
from kernel_device import DEVICE
from torch import Tensor

from fcsd.kernels.adamw import Moments, Rates, device_numbers, launch, update_reference

RATES = Rates(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def state(shape: tuple[int, ...]) -> tuple[Tensor, Moments]:
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    kept = Moments(*(tensor.to(DEVICE) for tensor in (master, torch.zeros(shape), torch.zeros(shape))))
    return kept.master.bfloat16(), kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (2, 1100)])  # part of a program, and several of them
def test_the_kernel_is_its_reference_and_torchs_adamw(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    sides = {"kernel": state(shape), "reference": state(shape)}
    torchs = sides["reference"][1].master.clone().requires_grad_()
    options = {"lr": RATES.lr, "betas": (RATES.beta1, RATES.beta2), "eps": RATES.eps}
    optimizer = torch.optim.AdamW([torchs], weight_decay=RATES.weight_decay, **options)
    for taken in range(1, 6):
        gradient = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        torchs.grad = gradient.float().clone()
        norm = torch.nn.utils.clip_grad_norm_([torchs], 0.5)
        numbers = device_numbers(norm, torch.tensor(taken, dtype=torch.float64, device=DEVICE), 0.5, RATES)
        optimizer.step()
        for name, function in (("kernel", launch), ("reference", update_reference)):
            weight, kept = sides[name]
            function(weight, gradient, kept, numbers, RATES)
            expected = (torchs, *(optimizer.state[torchs][key] for key in ("exp_avg", "exp_avg_sq")))
            for found, wanted in zip(kept, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)
            # Triton's interpreter cuts bf16 off, where a GPU rounds.
            torch.testing.assert_close(weight.float(), kept.master, rtol=2**-7, atol=0)


def test_a_weight_that_is_stored_by_columns() -> None:
    """Its master weight and its moments are stored likewise, but the gradient is not."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(5, 3, generator=generator).to(DEVICE)
    numbers = device_numbers(
        torch.ones((), device=DEVICE), torch.ones((), dtype=torch.float64, device=DEVICE), 0, RATES
    )
    sides = [state((3, 5)) for _ in range(2)]
    for (weight, kept), function in zip(sides, (launch, update_reference), strict=True):
        function(weight.T, gradient, Moments(*(tensor.T for tensor in kept)), numbers, RATES)
    for found, expected in zip(sides[0][1], sides[1][1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_a_step_that_is_not_taken_changes_nothing() -> None:
    numbers = device_numbers(
        torch.tensor(float("inf"), device=DEVICE), torch.zeros((), dtype=torch.float64, device=DEVICE), 1.0, RATES
    )
    for function in (launch, update_reference):
        weight, kept = state((4, 4))
        before = [tensor.clone() for tensor in (weight, *kept)]
        function(weight, torch.full_like(weight, float("nan")), kept, numbers, RATES)
        assert all(torch.equal(a, b) for a, b in zip(before, (weight, *kept), strict=True))
