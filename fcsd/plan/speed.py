"""How long a run takes: floating-point operations over an assumed share of the GPUs' peak."""

from dataclasses import dataclass

from fcsd.plan.model import ModelNumbers
from fcsd.plan.setup import Hardware, Setup

PEAK = {"bf16": 989e12, "fp32": 67e12}  # FLOP/s of an H200 without sparsity, from its data sheet

# Share of the peak that a step reaches, everything between two steps included: (has experts, dtype) -> share.
# Measured: eight DeepSeek-V2-Lite layers, EP 4, sequence 4096, 347.2 ms a step (docs/RESULTS.md, overlapped expert
# parallelism). The others are assumptions, not measured.
UTILISATION = {(True, "bf16"): 0.27, (False, "bf16"): 0.40, (True, "fp32"): 0.35, (False, "fp32"): 0.50}


@dataclass(frozen=True)
class Speed:
    """What a run takes.

    Attributes:
        flops: per token, recompute and teacher included.
        utilisation: assumed share of ``PEAK``.
        tokens_per_second: over all GPUs.
        cost: None without a price.
    """

    flops: float
    utilisation: float
    tokens_per_second: float
    hours: float
    gpu_hours: float
    cost: float | None


def forward_flops(model: ModelNumbers, seq_len: int) -> tuple[float, float]:
    """FLOPs of the layers and of the output head for one token.

    Two for each parameter that a token is multiplied with, and ``2 * (d_k + d_v)`` for each head and earlier token, of
    which there are ``seq_len / 2`` on average. Windows and document borders make attention cheaper than that.
    """
    multiplied = model.active - model.embedding - (0 if model.tied else model.head)
    return 2.0 * multiplied + float(len(model.layers) * model.attention * seq_len), 2.0 * model.head


def flops_per_token(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> float:
    """FLOPs of one training token: forward, twice that for backward, recomputed layers, the teacher's forward."""
    layers, head = forward_flops(model, setup.seq_len)
    student = 3 * (layers + head) + (layers if setup.recompute else 0)
    return student + (sum(forward_flops(teacher, setup.seq_len)) if setup.teacher != "none" else 0)


def speed(
    model: ModelNumbers, teacher: ModelNumbers, setup: Setup, hardware: Hardware, utilisation: float | None = None
) -> Speed:
    """Hours and cost of all steps; evaluation, checkpoints and loading come on top.

    Args:
        utilisation: replaces the table's share of the peak.
    """
    flops = flops_per_token(model, teacher, setup)
    share = utilisation or UTILISATION[bool(model.experts), setup.dtype]
    rate = hardware.world * PEAK[setup.dtype] * share / flops
    hours = setup.tokens / rate / 3600
    gpu_hours = hours * hardware.world
    cost = None if hardware.price is None else gpu_hours * hardware.price
    return Speed(flops, share, rate, hours, gpu_hours, cost)
