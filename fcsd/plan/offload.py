"""Memory and time of an optimizer whose states are on the host (``optim.offload``).

DeepSpeed 0.19.8 keeps the fp32 weights of ZeRO's partition, their gradients and a copy for the way back in pinned host
memory, and the optimizer keeps its moments in ordinary memory (``runtime/zero/stage_1_and_2.py``). The GPU keeps a
buffer of the size of the largest tensor.

The times add up the bytes that cross the bus, and the bytes that AdamW and the copies around it read and write in host
memory. One run on four H200s measured the rate of the bus, 25 GB/s in each direction, with other copies than these. The
rate of the host's memory is assumed, and so is that nothing of this overlaps with computation. AdamW on the host has
not been timed.
"""

from fcsd.plan.setup import Setup
from fcsd.plan.shard import Shard

BUS = 25e9  # bytes per second between a GPU and pinned memory, in each direction
HOST = 300e9  # bytes per second that the memory of a node delivers to all its processes: half of a common server's peak

# Bytes per updated parameter that a step reads and writes in host memory. AdamW reads a weight, a gradient and two
# moments in fp32, and writes all but the gradient. Before it, the gradient is scaled; after it, the weight is copied.
_ADAMW, _SCALED, _COPIED = 28, 8, 6


def host_optimizer_bytes(own: Shard, setup: Setup) -> int:
    """Bytes of host memory that a process needs for the optimizer's states and for the buffers beside them.

    torch rounds each pinned allocation up to a power of two (pytorch issue 150517).
    """
    if setup.offload == "none":
        return 0
    widths = (4, 4, setup.width)  # weights and gradients in fp32, weights on their way to the GPU
    pinned = sum(_power_of_two(width * group) for group in own.groups for width in widths)
    if summed_on_host(setup):
        pinned += setup.width * sum(own.partition)  # tensor by tensor; most experts' sizes are near a power of two
    return pinned + _power_of_two(setup.width * own.largest) + 8 * sum(own.partition)


def summed_on_host(setup: Setup) -> bool:
    """Whether the gradients of micro-batches are summed in host memory: under ZeRO-2 in the weights' own dtype."""
    return setup.zero_stage == 2 and setup.accumulation > 1 and setup.gradient_width == setup.width


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


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0
