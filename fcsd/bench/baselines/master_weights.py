"""AdamW with fp32 master weights, in plain torch: the optimizer of the sides that do not use DeepSpeed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MasterWeightsAdamW(torch.optim.Optimizer):
    """AdamW on fp32 copies of the weights, which are rounded to the weights' dtype after every step.

    ZeRO-1 on one process computes the same update: master weights and both moments take 12 bytes for each parameter.
    The gradients are converted to fp32 for the duration of a step.

    Args:
        params: the trained parameters.
        lr: the learning rate. A scheduler may change ``param_groups[0]["lr"]``.
        settings: the other arguments of ``torch.optim.AdamW``.
    """

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, {"lr": lr})
        self._weights: list[Tensor] = [weight for group in self.param_groups for weight in group["params"]]
        self._masters = [weight.detach().to(torch.float32, copy=True) for weight in self._weights]
        self._inner = torch.optim.AdamW(self._masters, lr=lr, fused=True, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the weights by their gradients. ``closure`` is not supported."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self._inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._inner.step()
        self._inner.zero_grad()
        torch._foreach_copy_(self._weights, self._masters)
