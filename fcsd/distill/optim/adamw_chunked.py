"""AdamW that updates its parameters chunk by chunk, so that its moments may be in bf16, in host memory, or both.

**In bf16.** The weights and the arithmetic stay in fp32. DeepSeek-V3 was trained with bf16 moments and fp32 weights, at
decay rates of 0.9 and 0.95 (arXiv 2412.19437, §3.3.3 and §4.2). At other decay rates it matters how the moments are
rounded. A bf16 number has eight significant bits, so rounding to nearest drops every change below 1/512 to 1/256 of the
value. With ``beta2 = 0.999`` the second moment ``v`` changes in a step by ``(g**2 / v - 1) / 1000`` of its value: it
could never fall, and it would grow only where ``g**2 > 3 v`` at least. Stochastic rounding takes the upper or the lower
neighbour with probabilities that make the stored value right in the mean (Gupta et al., arXiv 1502.02551, §3). AdamW's
moments are linear in the gradients and their squares, so that their means then follow the moments in fp32. What is left
is noise: with ``beta2 = 0.999`` about five per cent of ``v``, with 0.95 below one per cent, and half of that in the
size of the update.

**In host memory.** The update runs on the GPU. ``HostMoments`` copies each chunk of the moments to the GPU before its
update and back after it. Both directions of the bus and the update work at the same time, on different chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from fcsd.distill.optim.adamw_host_moments import HostMoments
from fcsd.distill.optim.host_copies import host_memory

CHUNK = 2**23  # elements that are updated at a time; their moments exist in fp32 on the parameters' device meanwhile

_MOMENTS = ("exp_avg", "exp_avg_sq")
_HALF = 0xFFFF  # the bits of an fp32 number that bf16 does not have


class ChunkedAdamW(Optimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

    The update of a chunk is torch's fused AdamW, on the CPU as well as on GPUs. With fp32 moments a step equals that of
    ``torch.optim.AdamW(fused=True)`` bit for bit. If the attribute ``found_inf`` is set to 1 by the caller, the step
    changes nothing. Without it every step is taken.

    Args:
        params: fp32 parameters, or groups of them.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        dtype: the dtype in which the moments are stored, bf16 or fp32.
        on_host: whether the moments are in host memory, wherever the parameters are.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
        on_host: bool = False,
    ) -> None:
        # ``draws`` counts the calls of ``step`` for a group, skipped ones included. It seeds the random numbers of the
        # rounding, and it is saved with the group, so that a resumed run draws the same numbers.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "draws": 0}
        super().__init__(params, defaults)
        self._dtype = dtype
        self._host = HostMoments(CHUNK) if on_host else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["draws"] += 1
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not with_gradient:
                continue
            noise: tuple[Tensor, ...] = ()
            if self._dtype == torch.bfloat16:
                noise = _noise(group["draws"], max(map(Tensor.numel, with_gradient)), with_gradient[0].device)
            for parameter in with_gradient:
                self._update(parameter, group, noise)

    def _update(self, parameter: Tensor, group: dict[str, Any], noise: tuple[Tensor, ...]) -> None:
        """Updates one parameter, chunk by chunk."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in _MOMENTS:
                state[name] = self._allocated(parameter).zero_()
        assert parameter.grad is not None
        whole = (parameter.view(-1), parameter.grad.reshape(-1), *(state[name].view(-1) for name in _MOMENTS))
        taken = state["step"]
        for weights, gradients, *stored in zip(*(tensor.split(CHUNK) for tensor in whole), strict=True):
            near = stored if self._host is None else self._host.fetch(stored, parameter.device)
            moments = [moment.float() for moment in near]  # not copies if they are in fp32
            taken = state["step"].clone()  # torch counts each call as a step
            adamw(
                [weights],
                [gradients],
                [moments[0]],
                [moments[1]],
                [],
                [taken],
                fused=True,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            if noise:
                for target, moment, drawn in zip(near, moments, noise, strict=True):
                    round_into(target, moment, drawn)
            if self._host is not None:
                self._host.put_back(near, stored)
        state["step"] = taken

    def state_dict(self) -> dict[str, Any]:
        """The state, after all copies to the host have ended."""
        if self._host is not None:
            self._host.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state. torch's own method would convert the moments to the dtype of the parameters, which is fp32."""
        if self._host is not None:
            self._host.wait()
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {
                    name: self._allocated(parameter).copy_(value)
                    if name in _MOMENTS
                    else value.to(parameter.device, copy=True)
                    for name, value in state_dict["state"][number].items()
                }

    def _allocated(self, parameter: Tensor) -> Tensor:
        """Memory for a moment of the parameter."""
        if self._host is None:
            return torch.empty(parameter.shape, dtype=self._dtype, device=parameter.device)
        return host_memory(parameter, self._dtype)


def round_into(target: Tensor, values: Tensor, noise: Tensor) -> None:
    """Rounds ``values`` to bf16 stochastically, and overwrites them.

    A value's upper neighbour is taken with the probability of its distance to the lower one, in units of their
    distance. Values that bf16 has, infinities among them, stay as they are.

    Args:
        target: bf16 ``[n]``, receives the result.
        values: contiguous fp32 ``[n]``.
        noise: int32, at least ``n`` numbers from 0 to 65535, evenly distributed.
    """
    # The upper half of an fp32 number is the bf16 number next to it in the direction of zero. The noise carries into
    # this half with the probability that is wanted. The halves lie in memory with the lower one first.
    values.view(torch.int32).add_(noise[: values.numel()])
    target.view(torch.int16).copy_(values.view(torch.int16)[1::2])


def _noise(seed: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random numbers from 0 to 65535 for the two moments, int32, as many as a chunk of a parameter needs.

    All chunks and parameters of a step share them. The means are right nevertheless, because they ask for numbers that
    are independent from step to step. They are the same on every rank, so that replicas stay equal.
    """
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (min(most, CHUNK),), generator=generator, dtype=torch.int32, device=device)
    return words & _HALF, words.bitwise_right_shift(16).bitwise_and_(_HALF)
