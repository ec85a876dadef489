"""Lets a plan count routed experts whose widths torch's grouped product refuses on the meta device."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALIGNED = 8  # values of 2 bytes in the 16 bytes that torch requires


class OddWidths(TorchFunctionMode):
    """While this is active, a grouped product of odd widths is computed with the first expert's weights.

    torch refuses rows that are not a multiple of 16 bytes on GPUs and on the meta device, although nothing is computed
    there. It computes them on CPUs, where such models are trained in tests. The product with one expert's weights keeps
    and returns the same bytes. All other products stay as they are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = getattr(torch, "_grouped_mm", None)
        if func is grouped and any(size % _ALIGNED for size in args[1].shape[1:]):
            rows, weights = args[0], args[1]  # [rows, in] and [experts, in, out]
            return rows @ weights[0]
        return func(*args, **(kwargs or {}))
