"""Numbers on their way from the device to the host, which goes on meanwhile."""

import torch
from torch import Tensor


class Readback:
    """Scalars by name, copied to pinned host memory behind the work that computes them.

    The constructor waits for nothing. ``wait`` waits for that work alone, not for what was launched later.

    Args:
        values: tensors of one element on one device, or numbers that the host knows already.
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
