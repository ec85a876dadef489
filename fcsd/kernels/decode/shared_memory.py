"""Says how much shared memory a program of a kernel can have, by which kernels choose the sizes of their blocks."""

from typing import Any

import torch

_HOPPER = 232448  # bytes, for Triton's interpreter, which has no limit


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have: 99 KiB to 227 KiB on NVIDIA's GPUs, 64 KiB on an MI300X."""
    if device.type != "cuda":
        return _HOPPER
    properties: Any = torch.cuda.get_device_properties(device)
    # AMD's GPUs have one limit. On NVIDIA's, Triton asks for the higher one of two.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
