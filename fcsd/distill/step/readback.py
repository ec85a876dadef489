"""Copies numbers from the device to the host without making the host wait."""

import torch
from torch import Tensor


class Readback:
    """Copies named scalars to pinned host memory as soon as the device has computed them.

    The constructor only launches the copy. ``wait`` waits for the copy, but not for work that was launched after it.

    Args:
        values: by name, tensors of one element, all on one device, or numbers that are already on the host.
    """

    def __init__(self, values: dict[str, Tensor | float]) -> None:
        self._values = values
        self._names = [name for name, value in values.items() if isinstance(value, Tensor)]
        tensors = [value.detach().double() for value in values.values() if isinstance(value, Tensor)]
        stacked = torch.stack(tensors) if tensors else torch.empty(0)  # fp64 holds every fp32 value exactly
        self._copied: torch.cuda.Event | None = None
        self._host = stacked
        if stacked.is_cuda:
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> dict[str, float]:
        """The numbers by name, in the order in which they were given."""
        if self._copied is not None:
            self._copied.synchronize()
        found = dict(zip(self._names, self._host.tolist(), strict=True))
        return {name: found[name] if name in found else float(value) for name, value in self._values.items()}
