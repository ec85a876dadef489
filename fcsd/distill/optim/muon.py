"""Muon for the matrices of the decoder layers of a run of one process, and AdamW for all other weights.

Muon (Keller Jordan, 2024) keeps one momentum of a matrix and updates the matrix by that momentum made orthogonal: five
Newton-Schulz steps bring its singular values near 1. The size of the update is scaled by ``0.2 sqrt(larger side)``
(Moonlight, arXiv 2502.16982, eq. 4), so that it has the root mean square of an update of AdamW, and both share one
learning rate. The matrices of one shape are multiplied together: a small model has hundreds, and its step would
otherwise be as many launches.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.kernels import adamw
from fcsd.kernels.adamw import Rates

MOMENTUM = 0.95
_STEPS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration, from Muon's release
_TOGETHER = 2**26  # most elements of the matrices that are multiplied together


class OneProcessMuon(OneProcessAdamW):
    """``OneProcessAdamW`` whose groups with ``muon: True`` are updated by Muon, on the same fp32 master weights."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient. If the norm of all gradients is not finite, nothing changes."""
        assert closure is None
        self._measure()
        for group in self.param_groups:
            if not group["muon"]:
                self._adamw(group)
                continue
            rates = self._rates(group)
            numbers = adamw.device_numbers(self.norm, self.taken, self._grad_clip, rates)
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, alike in by_shape.items():
                count = max(_TOGETHER // shape.numel(), 1)
                for first in range(0, len(alike), count):
                    self._update(alike[first : first + count], numbers, rates)

    def _update(self, weights: list[nn.Parameter], numbers: Tensor, rates: Rates) -> None:
        """Takes a step of Muon for matrices, or stacks of matrices, of one shape.

        Args:
            numbers: see ``fcsd.kernels.adamw.device_numbers``; the first says whether the step is taken.
        """
        taken, momenta = numbers[0] != 0, [self.state[weight]["exp_avg"] for weight in weights]
        gradients = torch.stack([weight.grad.float() for weight in weights if weight.grad is not None]) * numbers[1]
        before = torch.stack(momenta)
        momentum = before.lerp(gradients, 1 - MOMENTUM)
        changes = orthogonal(gradients.lerp(momentum, MOMENTUM))  # Nesterov's momentum
        scale = 0.2 * max(weights[0].shape[-2:]) ** 0.5
        momentum = torch.where(taken, momentum, before)
        changes = torch.where(taken, changes * (rates.lr * scale), 0.0)
        decay = torch.where(taken, 1 - rates.lr * rates.weight_decay, 1.0)
        for weight, kept, new, change in zip(weights, momenta, momentum, changes, strict=True):
            kept.copy_(new)
            master = self.state[weight]["master"]
            weight.copy_(master.mul_(decay).sub_(change))


def orthogonal(matrices: Tensor) -> Tensor:
    """About ``U V^T`` of each matrix ``U S V^T``: its singular values become numbers between about 0.7 and 1.2.

    Args:
        matrices: fp32 ``[..., rows, columns]``.

    Returns: fp32, of the same shape; the products are computed in bf16.
    """
    high = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if high else matrices).bfloat16().flatten(0, -3)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    x = x.unflatten(0, matrices.shape[:-2]).float()
    return x.mT if high else x


def muon_groups(student: nn.Module, groups: list[Any]) -> list[dict[str, Any]]:
    """The groups of parameters, each divided into the matrices of decoder layers and the rest.

    A matrix has two dimensions, or three if a layer stacks those of its experts. Weights of convolutions have three,
    too, the second of which is 1; AdamW updates them.
    """
    matrices = {
        id(parameter)
        for name, parameter in student.named_parameters()
        if ".layers." in name and parameter.ndim in (2, 3) and parameter.shape[-2] > 1
    }
    divided = []
    for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
        for muon in (True, False):
            part = [parameter for parameter in group["params"] if (id(parameter) in matrices) is muon]
            if part:
                divided.append({**group, "params": part, "muon": muon})
    return divided
