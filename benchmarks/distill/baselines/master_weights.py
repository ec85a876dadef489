"""AdamW with fp32 master weights, in plain torch: the optimizer of the sides that do not use DeepSpeed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TOGETHER = 2**26  # parameters that are updated together, unless a single tensor has more


class MasterWeightsAdamW(torch.optim.Optimizer):
    """AdamW on fp32 copies of the weights, which are rounded to the weights' dtype after every step.

    ZeRO-1 on one process computes the same update: master weights and both moments take 12 bytes for each parameter.
    The gradients are converted to fp32 for some tensors at a time, so that a step needs little further memory.

    Args:
        params: the trained parameters.
        lr: the learning rate. A scheduler may change ``param_groups[0]["lr"]``.
        settings: the other arguments of ``torch.optim.AdamW``.
    """

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, {"lr": lr})
        self._parts: list[tuple[list[Tensor], list[Tensor], torch.optim.AdamW]] = []
        for weights in _parted([weight for group in self.param_groups for weight in group["params"]]):
            masters = [weight.detach().to(torch.float32, copy=True) for weight in weights]
            self._parts.append((weights, masters, torch.optim.AdamW(masters, lr=lr, fused=True, **settings)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the weights by their gradients. ``closure`` is not called."""
        for weights, masters, adamw in self._parts:
            for weight, master in zip(weights, masters, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
            adamw.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            adamw.step()
            adamw.zero_grad()
            torch._foreach_copy_(weights, masters)  # pyright: ignore[reportPrivateImportUsage]


def _parted(weights: list[Tensor]) -> list[list[Tensor]]:
    """Divides tensors into consecutive lists of at most ``_TOGETHER`` numbers, or of one tensor."""
    parts: list[list[Tensor]] = []
    held = 0
    for weight in weights:
        held += weight.numel()
        if not parts or held > _TOGETHER:
            parts.append([])
            held = weight.numel()
        parts[-1].append(weight)
    return parts
