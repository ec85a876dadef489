"""AdamW with fp32 master weights for a run of one process, in place of DeepSpeed's ZeRO.

On one process ZeRO divides nothing. It copies each gradient into a bucket, divides it, sends it to itself and copies it
back; then it converts all gradients to fp64 for their norm, copies them into one flat tensor and converts that to fp32.
By the size of these tensors, a step of ZeRO-1 moves 80 to 100 bytes of memory for each parameter, and it needs up to 8
bytes for each parameter above weights and states. The update here moves 30 bytes, and needs none: a pass over the
gradients for their norm, and one kernel for each parameter (``fcsd.kernels.adamw``). Master weights and moments are
those of ZeRO.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fcsd.distill.optim.adamw_norms import l2_norm
from fcsd.kernels import adamw
from fcsd.kernels.adamw import Moments, Rates

_NAMES = ("master", "exp_avg", "exp_avg_sq")  # the names of the fields of ``Moments`` in checkpoints


class OneProcessAdamW(Optimizer):
    """AdamW on fp32 master weights, which are rounded to the weights after every step. The host never waits.

    Gradients are clipped by their norm. If the norm is not finite, the step changes nothing.

    Args:
        params: the trained parameters, or groups of them.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        grad_clip: the norm to which the gradients are clipped; 0 does not clip.

    Attributes:
        norm: the norm of the gradients of the last step before they were clipped; a scalar on the device.
        taken: how many steps were taken, an fp64 scalar on the device.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, grad_clip: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._grad_clip = grad_clip
        for parameter in self._parameters():
            masters = parameter.detach().to(torch.float32, copy=True)
            kept = Moments(masters, torch.zeros_like(masters), torch.zeros_like(masters))
            self.state[parameter] = dict(zip(_NAMES, kept, strict=True))
        device = self._parameters()[0].device
        self.norm = torch.zeros((), device=device)
        self.taken = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient.

        The others stay as they are, as in torch. ZeRO gives them a gradient of zeros, so that their weights decay.
        """
        assert closure is None
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        self.norm = l2_norm(gradients, self.taken.device)
        self.taken += self.norm.isfinite()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rates = Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
            numbers = adamw.device_numbers(self.norm, self.taken, self._grad_clip, rates)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = Moments(*(self.state[parameter][name] for name in _NAMES))
                    adamw.update(parameter, parameter.grad, kept, numbers, rates)

    def state_dict(self) -> dict[str, Any]:
        """The state; its tensors are those of the optimizer, not copies."""
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class.

        torch's own method would convert the states to the dtype of the parameters, which is bf16.
        """
        for number, parameter in enumerate(self._parameters()):
            for name in _NAMES:
                self.state[parameter][name].copy_(state_dict["state"][number][name])
        self.taken.copy_(state_dict["taken"])

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
