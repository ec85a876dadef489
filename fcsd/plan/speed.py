"""How long a run takes: its steps by a model of four measured constants, then checkpoints, evaluations and the teacher.

A micro-batch takes the longer of two times, because the host starts kernels while the device computes:

- the device's: floating-point operations over a share of the GPU's peak;
- the host's: a time for each pass through a layer, which limits small models and small micro-batches.

The optimizer adds a time for each parameter that a GPU updates. The constants were fitted to runs on H200s that are
stored in ``docs/results``; ``tests/plan/test_measured_runs.py`` repeats the fit, and predicts each run from the others.
"""

from dataclasses import dataclass, replace

from fcsd.plan.memory import checkpoint_bytes, shard
from fcsd.plan.model import ModelNumbers
from fcsd.plan.setup import Hardware, Setup

PEAK = {"bf16": 989e12, "fp32": 67e12}  # FLOP/s of an H200 without sparsity, from its data sheet

# Share of the peak in forward and backward passes: (has experts, dtype) -> share. The one of experts in bf16 is fitted
# to seven runs of DeepSeek-V2-Lite, DeepSeek-V3 and Qwen3-30B-A3B layers on two and four H200s; the others are assumed.
SHARE = {(True, "bf16"): 0.42, (False, "bf16"): 0.45, (True, "fp32"): 0.35, (False, "fp32"): 0.50}

# Times as long as the causal attention of a whole row without a mask: fitted to one run, with a mask and without.
MASKED_ATTENTION = 2.8

# Seconds in which the host starts the kernels of a layer's forward pass; a backward pass counts as two. Fitted to one
# run, of the bundled model; it does not depend on the number of tokens.
LAUNCH = 2.7e-3

# Seconds for each parameter that a GPU updates: its gradient is reduced, AdamW runs, and the weights are gathered.
UPDATE = 34e-12

# Assumed, not measured: bytes that a node writes per second into a checkpoint, and seconds of one score by a benchmark.
WRITE = 2e9
BENCHMARK = 300.0


@dataclass(frozen=True)
class Speed:
    """What a run takes.

    Attributes:
        flops: per token, recompute and teacher included.
        utilisation: share of ``PEAK`` that the steps reach, recomputed layers not counted, as ``mfu`` in metrics.jsonl.
        tokens_per_second: over all GPUs, during steps.
        limited_by_host: starting kernels takes longer than the kernels.
        parts: hours of ``forward and backward``, ``optimizer``, ``checkpoints``, ``evaluations`` and ``teacher cache``.
        hours: the sum of ``parts``.
        cost: None without a price.
    """

    flops: float
    utilisation: float
    tokens_per_second: float
    limited_by_host: bool
    parts: dict[str, float]
    hours: float
    gpu_hours: float
    cost: float | None


def forward_flops(model: ModelNumbers, seq_len: int) -> tuple[float, float]:
    """FLOPs of the layers and of the output head for one token.

    Two for each parameter that a token is multiplied with, and ``2 * (d_k + d_v)`` for each head and earlier token, of
    which there are ``seq_len / 2`` on average. Windows and document borders make attention cheaper than that.
    """
    multiplied = model.active - model.embedding - (0 if model.tied else model.head)
    return 2.0 * multiplied + attention_flops(model, seq_len), 2.0 * model.head


def attention_flops(model: ModelNumbers, seq_len: int) -> float:
    """The part of attention's scores in ``forward_flops``, of all layers."""
    return float(len(model.layers) * model.attention * seq_len)


def flops_per_token(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> float:
    """FLOPs of one training token: forward, twice that for backward, recomputed layers, the teacher's forward."""
    layers, head = forward_flops(model, setup.seq_len)
    student = 3 * (layers + head) + (layers if setup.recompute else 0)
    return student + (sum(forward_flops(teacher, setup.seq_len)) if setup.teacher != "none" else 0)


def work_per_token(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> float:
    """As ``flops_per_token``, with attention weighed by the time that it takes: by ``MASKED_ATTENTION`` under a mask,
    and otherwise by the length of documents."""
    factor = MASKED_ATTENTION if setup.masked else (setup.document or setup.seq_len) / setup.seq_len
    attention = (3 + setup.recompute) * attention_flops(model, setup.seq_len)
    if setup.teacher != "none":
        attention += attention_flops(teacher, setup.seq_len)
    return flops_per_token(model, teacher, setup) + (factor - 1) * attention


def layer_passes(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> int:
    """Forward passes of one layer that a micro-batch consists of, a backward pass counted as two."""
    student = (3 + setup.recompute) * len(model.layers)
    return student + (len(teacher.layers) if setup.teacher != "none" else 0)


def micro_batch_seconds(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> tuple[float, float]:
    """Of one micro-batch the device's seconds and the host's, of which the longer one counts."""
    tokens = setup.micro_batch_size * setup.seq_len
    rate = PEAK[setup.dtype] * SHARE[bool(model.experts), setup.dtype]
    device = work_per_token(model, teacher, setup) * tokens / rate
    return device, LAUNCH * layer_passes(model, teacher, setup)


def update_seconds(model: ModelNumbers, setup: Setup) -> float:
    """The optimizer's part of a step."""
    return UPDATE * sum(shard(model, setup).partition)


def step_seconds(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> float:
    """A step of all micro-batches and the optimizer."""
    return setup.accumulation * max(micro_batch_seconds(model, teacher, setup)) + update_seconds(model, setup)


def speed(
    model: ModelNumbers, teacher: ModelNumbers, setup: Setup, hardware: Hardware, utilisation: float | None = None
) -> Speed:
    """Hours and cost of the run: steps, checkpoints, evaluations, and the pass that writes a teacher cache.

    Loading, and tokenising the text, come on top.

    Args:
        utilisation: the share of the peak that was measured for whole steps, ``mfu`` in metrics.jsonl; it replaces the
            model of a step.
    """
    counted = flops_per_token(model, teacher, replace(setup, recompute=False))
    peak = hardware.world * PEAK[setup.dtype]
    device, host = micro_batch_seconds(model, teacher, setup)
    seconds, update = step_seconds(model, teacher, setup), update_seconds(model, setup)
    if utilisation is not None:
        longer = counted * setup.batch_tokens / (peak * utilisation) / seconds
        seconds, update, host = seconds * longer, update * longer, 0.0
    rate = setup.batch_tokens / seconds
    forward_rate = peak * SHARE[bool(teacher.experts), setup.dtype]
    teacher_flops, student_flops = (sum(forward_flops(one, setup.seq_len)) for one in (teacher, model))
    measured = student_flops + (teacher_flops if setup.teacher != "none" else 0)
    steps = setup.steps / 3600
    parts = {
        "forward and backward": steps * (seconds - update),
        "optimizer": steps * update,
        "evaluations": (
            setup.evaluations * setup.held_out * setup.seq_len * measured / forward_rate + setup.benchmarks * BENCHMARK
        )
        / 3600,
        "teacher cache": setup.tokens * teacher_flops / forward_rate / 3600 if setup.cached else 0.0,
    }
    saves = setup.saves + setup.saves_per_hour * sum(parts.values())
    parts["checkpoints"] = saves * checkpoint_bytes(model, setup) / (WRITE * hardware.nodes) / 3600
    hours = sum(parts.values())
    gpu_hours = hours * hardware.world
    return Speed(
        flops=flops_per_token(model, teacher, setup),
        utilisation=rate * counted / peak,
        tokens_per_second=rate,
        limited_by_host=host > device,
        parts=parts,
        hours=hours,
        gpu_hours=gpu_hours,
        cost=None if hardware.price is None else gpu_hours * hardware.price,
    )
