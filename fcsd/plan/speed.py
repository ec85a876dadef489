"""Estimates how long a run takes: its steps, its checkpoints and its evaluations.

The time of a step follows from measured constants. A micro-batch takes the longer of two times, because the host starts
kernels while the device computes:

- The device's time is the number of floating-point operations divided by a share of the GPU's peak, and a constant. In
  small models it is the time in which the values of the residual stream are read and written.
- The host's time is a constant for each pass through a layer. It limits small models and small micro-batches.

The optimizer adds a time for each parameter that a GPU updates. The constants were fitted to runs on H200s, which
``benchmarks/results/plan_runs.json`` lists. ``tests/plan/test_measured_runs.py`` repeats the fit and predicts each run
from the others.
"""

import math
from dataclasses import dataclass, replace

from fcsd.errors import ConfigError
from fcsd.plan.memory import Shard, copy_bytes, saved_bytes, shard, summed_on_host
from fcsd.plan.model import ModelNumbers
from fcsd.plan.setup import Hardware, Setup
from fcsd.progress import duration

PEAK = {"bf16": 989e12, "fp32": 67e12}  # FLOP/s of an H200 without sparsity, from its data sheet

LEAST_SHARE = 0.001  # of the peak; a smaller one that is given as measured is a mistake

# Share of the peak that forward and backward passes reach: (experts are divided, dtype) -> share. The shares in bf16
# were fitted: with divided experts to nine runs of three models on two and four H200s, without them to eight runs of
# a dense model and a mixture of experts on one H200. The shares in fp32 are assumed.
SHARE = {(True, "bf16"): 0.432, (False, "bf16"): 0.510, (True, "fp32"): 0.35, (False, "fp32"): 0.50}

# Widths of dense models between which the share in bf16 grows with the logarithm of the width, from that of ``SHARE``
# to ``WIDE_SHARE``, because wide products reach more. The latter is that of six layers of Llama-3 70B's width on two
# H200s, tensor-parallel or whole. Twelve layers of 8B's width, on H100s, reach what lies between. No run was wider.
NARROW, WIDE = 2048, 8192
WIDE_SHARE = 0.665

# Seconds of the device for each micro-batch, with any number of tokens: by how much a step of eight micro-batches of
# one row is longer than a step of one with eight rows, in a dense model and in a mixture of experts.
MICRO_BATCH = 10.7e-3

# Time of attention with a mask, divided by the time of causal attention over the whole row without a mask. It was
# fitted to two pairs of runs with a mask and without; they say 2.9 and 5.1.
MASKED_ATTENTION = 3.9

# Seconds that the host needs to start the kernels of a layer's forward pass. A backward pass counts as two forward
# passes. The value does not depend on the number of tokens. No run of a dense model was limited by the host; its value
# is the shortest time that any pass took, and therefore an upper bound. The other two were fitted to runs of one model
# each. The host varies: the same code took up to twice as long beside other work.
LAUNCH = {"dense": 1.05e-3, "experts": 1.64e-3, "divided experts": 5.6e-3}

# Seconds of the device for each value of the residual stream that passes through a layer, a backward pass counted as
# two. Small models are limited by this, because they do little arithmetic for each value. Fitted to a run of the
# bundled model, with a width of 128. Most of it are values inside of layers, so tensor-parallel ranks divide it.
# Without all-reduces a step of two such ranks took as long as one of whole layers: 462.7 and 459.5 ms at 70B's width.
TRAFFIC = 1.01e-10

# Seconds for each parameter that a GPU updates: its gradient is reduced, AdamW runs, and the weights are gathered.
# The runs computed the norm of the gradients as DeepSpeed does, which takes longer than today's.
UPDATE = 33e-12

# The same for one process that updates its weights without ZeRO: the kernel of the update in two traced steps.
UPDATE_ALONE = 6.92e-12

# Bytes per second that a node writes into a checkpoint, bytes per second that each process copies to host memory, and
# seconds that a benchmark needs for one score. These values are assumed, not measured.
WRITE = 2e9
COPY = 10e9
BENCHMARK = 300.0


# Bytes per second at which a GPU decodes NF4: two are written and half of one is read for each value. Assumed.
DECODE = 2e12

# With the optimizer on the host, bytes cross the bus, and AdamW and the copies around it read and write host memory.
# One run on four H200s measured the rate of the bus, with other copies than these. The rate of the memory is assumed,
# and so is that nothing of this overlaps with computation. AdamW there has not been timed.
BUS = 25e9  # bytes per second between a GPU and pinned memory, in each direction
HOST = 300e9  # bytes per second that the memory of a node delivers to all its processes: half of a common server's peak

# Bytes per updated parameter that a step reads and writes in host memory. AdamW reads a weight, a gradient and two
# moments in fp32, and writes all but the gradient. Before it, the gradient is scaled; after it, the weight is copied.
_ADAMW, _SCALED, _COPIED = 28, 8, 6


@dataclass(frozen=True)
class Speed:
    """The estimated speed, time and cost of a run.

    Attributes:
        flops: floating-point operations per token, recompute and teacher included.
        utilisation: share of ``PEAK`` that the steps reach; recomputed layers are not counted. This is ``mfu`` in
            metrics.jsonl.
        tokens_per_second: tokens of all GPUs per second during steps.
        limited_by_host: whether the host needs more time to start the kernels than the device needs to run them.
        parts: hours of ``forward and backward``, ``optimizer``, ``checkpoints`` and ``evaluations``.
        hours: the sum of ``parts``.
        gpu_hours: hours times GPUs.
        cost: price of all GPU-hours; None if no price is known.
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
    """FLOPs of the layers and of the output head for one token in a forward pass.

    There are two FLOPs for each parameter that a token is multiplied with, and ``2 * (d_k + d_v)`` for each head and
    earlier token. A token has ``seq_len / 2`` earlier tokens on average. Attention windows and document borders make
    attention cheaper than this.
    """
    multiplied = model.active - model.embedding - (0 if model.tied else model.head)
    return 2.0 * multiplied + attention_flops(model, seq_len), 2.0 * model.head


def attention_flops(model: ModelNumbers, seq_len: int) -> float:
    """FLOPs of the attention of one token to earlier ones in all layers; ``forward_flops`` includes them."""
    return float(len(model.layers) * model.attention * seq_len)


def flops_per_token(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> float:
    """FLOPs of one training token: forward, twice as many for backward, recomputed layers, the teacher's forward.

    No gradients of frozen weights are computed, and none at all in frozen first layers. Those that
    student and teacher share are computed in the teacher's pass alone.
    """
    layers, head = forward_flops(model, setup.seq_len)
    by_teacher = sum(forward_flops(teacher, setup.seq_len)) if setup.teacher != "none" else 0
    if (parts := setup.parts) is None:
        return 3 * (layers + head) + (layers if setup.recompute else 0) + by_teacher
    layers += 2.0 * parts.in_adapters
    active = parts.trained - parts.routed + parts.routed * model.top_k / max(1, model.experts)
    attention, trained = attention_flops(model, setup.seq_len), 2.0 * active
    student = 2 * (layers + head) + attention + trained + (layers if setup.recompute else 0)
    for count, passes in ((shared_layers(setup), 1), (parts.frozen, 1 + setup.recompute)):
        student -= passes * _first_flops(model, setup.seq_len, count)
    if parts.drafts:  # the output head of the model as its teacher; forward and backward pass of the draft head
        student += head + 2 * trained
    return student - attention * parts.frozen / len(model.layers) + by_teacher


def shared_layers(setup: Setup) -> int:
    """The first layers that are computed once for student and teacher; see ``fcsd.distill.teacher.shared``."""
    if setup.parts is None or setup.teacher == "none" or setup.ep_size > 1 or setup.compared:
        return 0
    return setup.parts.shared


def _first_flops(model: ModelNumbers, seq_len: int, count: int) -> float:
    """FLOPs of the first layers for one token in a forward pass."""
    active = sum(
        layer.dense + (layer.routed * model.top_k // model.experts if model.experts else 0)
        for layer in model.layers[:count]
    )
    return 2.0 * active + attention_flops(model, seq_len) * count / len(model.layers)


def work_per_token(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> float:
    """FLOPs as in ``flops_per_token``, but attention's are weighted by the time that they take.

    The weight is ``MASKED_ATTENTION`` with a mask. Without one it is the mean length of documents divided by that of
    rows.
    """
    factor = MASKED_ATTENTION if setup.masked else (setup.document or setup.seq_len) / setup.seq_len
    passes = layer_passes(model, teacher, setup)[0] / len(model.layers)
    attention = passes * attention_flops(model, setup.seq_len)
    if setup.teacher != "none":
        attention += attention_flops(teacher, setup.seq_len)
    return flops_per_token(model, teacher, setup) + (factor - 1) * attention


def layer_passes(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> tuple[int, int]:
    """Forward passes of a layer in one micro-batch, of student and teacher; a backward pass counts as two."""
    frozen = 0 if setup.parts is None else setup.parts.frozen
    student = (3 + setup.recompute) * len(model.layers) - (2 + setup.recompute) * frozen - shared_layers(setup)
    return student, len(teacher.layers) if setup.teacher != "none" else 0


def launch_seconds(model: ModelNumbers, divided: bool) -> float:
    """Seconds of the host for the forward pass of one layer: ``LAUNCH``."""
    return LAUNCH["dense" if not model.experts else "divided experts" if divided else "experts"]


def micro_batch_seconds(model: ModelNumbers, teacher: ModelNumbers, setup: Setup) -> tuple[float, float]:
    """Seconds of the device and seconds of the host for one micro-batch; the larger of them is its duration."""
    tokens = setup.micro_batch_size * setup.seq_len
    student_passes, teacher_passes = layer_passes(model, teacher, setup)
    traffic = TRAFFIC * (student_passes * model.hidden + teacher_passes * teacher.hidden) / setup.tp_size
    device = tokens * max(work_per_token(model, teacher, setup) / forward_rate(model, setup), traffic) + MICRO_BATCH
    device += decode_seconds(model, setup)
    host = student_passes * launch_seconds(model, setup.ep_size > 1)
    return device, host + teacher_passes * launch_seconds(teacher, setup.teacher == "sharded")


def decode_seconds(model: ModelNumbers, setup: Setup) -> float:
    """Seconds in which the passes of one micro-batch, of student and teacher, decode the weights that are in NF4."""
    if setup.parts is None or setup.parts.rounded is None:
        return 0.0
    student, teacher = layer_passes(model, model, setup)
    passes = student - (len(model.layers) - setup.parts.frozen) + teacher  # a backward pass decodes once
    return passes / len(model.layers) * 2.5 * setup.parts.rounded.values / DECODE


def peak_share(model: ModelNumbers, setup: Setup) -> float:
    """Share of a GPU's peak that forward and backward passes reach; measured on H200s, assumed on others."""
    share = SHARE[setup.ep_size > 1, setup.dtype]
    if setup.dtype == "bf16" and not model.experts:
        wider = math.log(model.hidden / NARROW) / math.log(WIDE / NARROW)
        share += (WIDE_SHARE - share) * min(1.0, max(0.0, wider))
    return share


def forward_rate(model: ModelNumbers, setup: Setup) -> float:
    """FLOP/s that one GPU reaches in forward and backward passes."""
    return PEAK[setup.dtype] * peak_share(model, setup)


def reading_seconds(model: ModelNumbers, setup: Setup, divided: bool) -> float:
    """Seconds for each token of text in a forward pass alone, on all GPUs, in micro-batches of the run's size.

    Args:
        divided: whether the experts of ``model`` are divided among processes.
    """
    tokens = setup.micro_batch_size * setup.seq_len
    device = sum(forward_flops(model, setup.seq_len)) * tokens / forward_rate(model, setup)
    return max(device, len(model.layers) * launch_seconds(model, divided)) / (tokens * setup.copies)


def update_seconds(model: ModelNumbers, setup: Setup, gpus: int = 8) -> float:
    """Seconds of the optimizer in a step.

    With the optimizer on the host, ``transfer_seconds`` and ``host_seconds`` come on top of the time that was measured
    with all of it on the GPU, which includes the communication.

    Args:
        gpus: processes of a node; they share its memory.
    """
    own = shard(model, setup)
    if setup.zero_stage and not setup.zero:
        return UPDATE_ALONE * sum(own.partition)
    if setup.offload == "host":
        return UPDATE * sum(own.partition) + transfer_seconds(own, setup) + host_seconds(own, gpus)
    return UPDATE * sum(own.partition)


def step_seconds(model: ModelNumbers, teacher: ModelNumbers, setup: Setup, gpus: int) -> float:
    """Seconds of a step: all its micro-batches, and the optimizer; see ``update_seconds``."""
    passes = max(*micro_batch_seconds(model, teacher, setup))
    return setup.accumulation * passes + update_seconds(model, setup, gpus)


def checkpoint_hours(model: ModelNumbers, setup: Setup, hardware: Hardware, hours: float) -> float:
    """Hours for which steps wait for checkpoints.

    A checkpoint that is written while the run goes on costs the time of the copy to host memory. If writing takes
    longer than the time between two checkpoints, the next one waits for the rest. The run always waits for its last
    checkpoint.

    Args:
        model: what one tensor-parallel rank has of the student. A checkpoint has the parts of all ranks.
        hours: the duration of the run without its checkpoints.
    """
    saves = setup.saves + setup.saves_per_hour * hours
    write = setup.tp_size * saved_bytes(model, setup) / (WRITE * hardware.nodes) / 3600
    if not setup.saves_beside or saves <= 1:
        return saves * write
    copy = setup.tp_size * copy_bytes(model, setup) / COPY / 3600
    return (saves - 1) * (copy + max(0.0, write - hours / saves)) + write


def speed(
    model: ModelNumbers, teacher: ModelNumbers, setup: Setup, hardware: Hardware, utilisation: float | None = None
) -> Speed:
    """Hours and cost of the run: steps, checkpoints and evaluations.

    The time for loading the models and for tokenising the text is not included.

    Args:
        utilisation: the share of the peak that was measured for whole steps, ``mfu`` in metrics.jsonl. If it is given,
            the time of a step follows from it instead of from the constants of this module.

    Raises:
        ConfigError: the share is not from ``LEAST_SHARE`` to 1, or checkpoints are so frequent that they never end.
    """
    if utilisation is not None and not LEAST_SHARE <= utilisation <= 1:
        raise ConfigError(f"no run reaches {utilisation:g} of the peak", hint="--mfu takes a share, such as 0.4")
    # Recomputed layers do not count. Every rank that shards a model computes its part for each token.
    useful = setup.tp_size * flops_per_token(model, teacher, replace(setup, recompute=False))
    peak = hardware.world * PEAK[setup.dtype]
    device, host = micro_batch_seconds(model, teacher, setup)
    seconds = step_seconds(model, teacher, setup, hardware.gpus)
    update = update_seconds(model, setup, hardware.gpus)
    if utilisation is not None:
        factor = useful * setup.batch_tokens / (peak * utilisation) / seconds
        seconds, update, host = seconds * factor, update * factor, 0.0
    rate = setup.batch_tokens / seconds
    by_teacher = reading_seconds(teacher, setup, divided=setup.teacher == "sharded")
    scored = reading_seconds(model, setup, divided=setup.ep_size > 1) + (by_teacher if setup.teacher != "none" else 0)
    steps = setup.steps / 3600
    parts = {
        "forward and backward": steps * (seconds - update),
        "optimizer": steps * update,
        "evaluations": (setup.evaluations * setup.held_out * setup.seq_len * scored + setup.benchmarks * BENCHMARK)
        / 3600,
    }
    parts["checkpoints"] = checkpoint_hours(model, setup, hardware, sum(parts.values()))
    hours = sum(parts.values())
    if not math.isfinite(hours):
        raise ConfigError("the checkpoints take no finite time", hint="set a larger checkpoint.every_minutes")
    gpu_hours = hours * hardware.world
    return Speed(
        flops=setup.tp_size * flops_per_token(model, teacher, setup),
        utilisation=rate * useful / peak,
        tokens_per_second=rate,
        limited_by_host=host > device,
        parts=parts,
        hours=hours,
        gpu_hours=gpu_hours,
        cost=None if hardware.price is None else gpu_hours * hardware.price,
    )


def readable(hours: float) -> str:
    """A number of hours with its unit: ``7.5 hours``, and below one hour ``12 min`` or ``45 s``."""
    return f"{hours:,.1f} hours" if hours >= 1 else duration(3600 * hours)


def transfer_seconds(own: Shard, setup: Setup) -> float:
    """Seconds of a step in which gradients travel to the host and weights back, if the bus carries ``BUS``.

    Gradients are sent once in fp32. If they are summed on the host, each micro-batch sends them, and every one but the
    first reads the sum back before.
    """
    bytes_each = 4 + setup.width
    if summed_on_host(setup):
        bytes_each += setup.width * (2 * setup.accumulation - 1)
    return bytes_each * sum(own.partition) / BUS


def host_seconds(own: Shard, gpus: int) -> float:
    """Seconds of AdamW on the host in a step, if the ``gpus`` processes of a node share ``HOST``."""
    return (_ADAMW + _SCALED + _COPIED) * sum(own.partition) * gpus / HOST
