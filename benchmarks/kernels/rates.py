"""The rates of a GPU that the programs in this folder compare kernels with."""

import torch
from benchmarks.turns import timings
from torch import Tensor

REPEATS = 9


def product_rate() -> float:
    """FLOP/s of a large bf16 matrix product on random data."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (timings({"": lambda: left @ right}, left.device, REPEATS)[""].median / 1e3)


def copy_rate(source: Tensor) -> float:
    """Bytes that a copy of ``source`` within the GPU reads and writes in a second."""
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timings({"": lambda: target.copy_(source)}, source.device, REPEATS)[""].median / 1e3)
