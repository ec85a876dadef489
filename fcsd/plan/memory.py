"""Computes the memory that one GPU needs over an optimizer step.

Weights, optimizer states and the teacher stay in memory for the whole step. The rest changes: activations shrink in the
backward pass while gradients grow, and the optimizer allocates temporaries. The peak is therefore computed as the
largest of several moments, each of which is the sum of its parts. The figures are those that
``torch.cuda.max_memory_allocated`` counts from the second step on. ``Memory.context`` and ``Memory.slack`` are added to
them.

ZeRO works as in DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``) with the configuration of ``distill.step.engine``:
dense parameters are partitioned over all processes, and routed experts over the ``world / ep_size`` processes that hold
the same experts. With the optimizer's states on the host (``optim.offload``) it keeps the fp32 weights of its
partition, their gradients and a copy for the way back in pinned host memory, and the optimizer keeps its moments in
ordinary memory. The GPU keeps a buffer of the size of the largest tensor.
"""

from dataclasses import dataclass

from fcsd.config.sections import TERMS, automatic_chunk
from fcsd.parallel.partitions import BUCKET, GROUP
from fcsd.parallel.transports import copies
from fcsd.plan.activations import LayerBytes
from fcsd.plan.model import DRAFT_HEAD, FINAL_NORM, ModelNumbers
from fcsd.plan.setup import GIB, USABLE, Hardware, Parts, Setup

# Memory that max_memory_allocated does not count. These are assumptions; nvidia-smi and memory_reserved can check them.
CONTEXT = int(0.8 * GIB)  # CUDA context, kernels, cuBLAS workspaces
# NCCL's buffers of one process group. There are up to three: all ranks, expert-parallel, expert-data-parallel.
COMMUNICATOR = int(0.5 * GIB)
# Share of the memory that is allocated and freed within a step: blocks that the caching allocator cannot reuse.
SLACK = 0.1
EXPERT_GROUP = 178_956_971  # most parameters of one of the groups into which DeepSpeed splits experts for its optimizer


@dataclass(frozen=True)
class Shard:
    """Numbers of parameters on one GPU.

    Attributes:
        trained: parameters that are trained.
        frozen: parameters of the student that are not trained.
        partition: trained parameters that the optimizer of this GPU updates: dense ones, and those of experts.
        groups: the same parameters by group of the optimizer. A group has at most ``GROUP`` parameters before ZeRO
            divides it, but a larger tensor is a group of its own. If experts are divided, groups of experts have at
            most ``EXPERT_GROUP`` parameters, and all dense parameters form one group.
        largest: parameters of the largest trained tensor.
    """

    trained: int
    frozen: int
    partition: tuple[int, int]
    groups: tuple[int, ...]
    largest: int


def shard(model: ModelNumbers, setup: Setup) -> Shard:
    """The student's parameters on one GPU.

    Args:
        model: what one tensor-parallel rank has of the student; see ``of_rank``.
    """
    if setup.parts is not None:
        return _frozen_shard(model, setup, setup.parts)
    frozen_embedding = model.embedding if setup.freeze_embeddings else 0
    frozen_head = model.head if setup.freeze_lm_head and not model.tied else 0
    dense = model.dense - frozen_embedding - frozen_head
    routed = model.routed // setup.ep_size
    ranks = setup.copies if setup.zero_stage else 1
    expert_ranks = setup.world // setup.ep_size if setup.zero_stage else 1
    partition = (-(-dense // ranks), -(-routed // expert_ranks))
    # The largest tensor of experts holds two of the three matrices of every expert in a layer.
    tensor = 2 * max(layer.routed for layer in model.layers) // (3 * setup.ep_size)
    largest = max(tensor, model.embedding - frozen_embedding, 0 if setup.freeze_lm_head else model.head)
    if not setup.zero_stage:
        groups = (sum(partition),)
    elif setup.ep_size > 1:
        groups = (partition[0], *_parts(partition[1], max(EXPERT_GROUP, tensor) // expert_ranks))
    else:
        groups = _parts(sum(partition), max(GROUP, largest) // ranks)
    return Shard(dense + routed, frozen_embedding + frozen_head, partition, groups, largest)


def _frozen_shard(model: ModelNumbers, setup: Setup, parts: Parts) -> Shard:
    """What trains, and what is frozen, on one GPU; the experts that train may be divided."""
    ranks, expert_ranks = (setup.copies, setup.world // setup.ep_size) if setup.zero_stage else (1, 1)
    routed, dense = parts.routed // setup.ep_size, parts.trained - parts.routed
    own = 0 if parts.drafts else parts.own - parts.routed + routed
    frozen = model.dense + model.routed // setup.ep_size - own
    if not routed or setup.ep_size == 1:
        updated = -(-parts.trained // ranks)
        groups = _parts(updated, max(GROUP, parts.largest) // ranks) if setup.zero_stage else (updated,)
        return Shard(parts.trained, frozen, (updated, 0), groups, parts.largest)
    partition, largest = (-(-dense // ranks), -(-routed // expert_ranks)), parts.largest // setup.ep_size
    groups = (partition[0], *_parts(partition[1], max(EXPERT_GROUP, largest) // expert_ranks))
    return Shard(dense + routed, frozen, partition, groups if setup.zero_stage else (sum(partition),), largest)


def _parts(whole: int, most: int) -> tuple[int, ...]:
    """The sizes of parts of at most ``most``."""
    rest = whole % most
    return (most,) * (whole // most) + ((rest,) if rest else ())


@dataclass(frozen=True)
class Moment:
    """Bytes by part at one moment of an optimizer step."""

    name: str
    weights: int
    optimizer: int
    teacher: int
    gradients: int = 0
    activations: int = 0
    loss: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """All bytes that are allocated at this moment."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by the name of the part."""
        return {name: value for name, value in vars(self).items() if name != "name"}


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU: the moments of a step, what must be added to the fullest of them, and what the GPU has.

    Attributes:
        context: bytes of the CUDA context, of NCCL's buffers and of the buffers that rows are received into.
        usable: bytes that the GPU has for the run.
    """

    moments: tuple[Moment, ...]
    context: int
    usable: int

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def slack(self) -> int:
        """Bytes that the caching allocator holds and cannot reuse, estimated from the peak."""
        peak = self.peak
        return int(SLACK * (peak.total - peak.weights - peak.optimizer - peak.teacher))

    @property
    def total(self) -> int:
        """Bytes that the GPU must have: the peak, the context and the slack."""
        return self.peak.total + self.context + self.slack

    @property
    def fits(self) -> bool:
        """Whether the GPU has as many bytes as the run needs."""
        return self.total <= self.usable


EIGHT_BIT = 2 + 2 * 4 / 256  # bytes of two moments in 8 bits, with a scale in fp32 for each 256 values


def state_width(setup: Setup) -> float:
    """Bytes per updated parameter of AdamW's two moments, and of the fp32 copy of the weight where one is made.

    ZeRO-1 and ZeRO-2 copy their partition even if the weights are in fp32. The other stages keep a copy for weights in
    bf16 only.
    """
    return (8 if setup.moments == "fp32" else EIGHT_BIT) + (
        4 if setup.zero_stage in (1, 2) or setup.dtype == "bf16" else 0
    )


def optimizer_bytes(own: Shard, setup: Setup) -> int:
    """Bytes of the optimizer's states on a GPU.

    If they are on the host, the GPU has a buffer for the gradient of one tensor instead.
    """
    if setup.offload == "host":
        return setup.width * own.largest
    return int(state_width(setup) * sum(own.partition))


def teacher_bytes(teacher: ModelNumbers, setup: Setup) -> int:
    """Bytes of the weights of a frozen teacher on one GPU; if parts train, only of those that the student changes."""
    if setup.teacher == "none":
        return 0
    if setup.parts is not None:
        own = setup.parts.own - setup.parts.routed + setup.parts.routed // setup.ep_size
        return setup.width * own
    ranks = setup.ep_size if setup.teacher == "sharded" else 1
    return setup.width * (teacher.dense + teacher.routed // ranks)


def loss_bytes(model: ModelNumbers, setup: Setup) -> tuple[int, int]:
    """Bytes of the loss's temporaries, and of the gradients that it returns; see ``fcsd.kernels.fused_kl``.

    Logits are in fp32 and exist for half a chunk at a time, for KL from both models. Their gradient exists for a whole
    chunk in the weights' dtype. For KL in bf16 this makes 6 bytes per logit: 315 MB were measured for 512 tokens and
    a vocabulary of 102 400 (benchmarks/results/README.md).
    """
    tokens = setup.micro_batch_size * setup.seq_len
    logits = min(setup.chunk_tokens or automatic_chunk(model.vocab), tokens) * model.vocab
    models = max((TERMS[name].models for name in setup.terms), default=1)
    to_hidden = len(setup.terms) * tokens * model.hidden * setup.width
    to_head = 0 if setup.freeze_lm_head else model.head * setup.width
    return logits * (2 * models + setup.width), to_hidden + to_head


def decoded_bytes(setup: Setup) -> int:
    """Bytes of a weight that a pass decodes from NF4, and of what ``peft``'s own forward pass writes beside the output.

    These are its output before and after the adapter's factor, and the output without the adapter.
    """
    rounded = None if setup.parts is None else setup.parts.rounded
    if rounded is None:
        return 0
    return setup.width * (rounded.largest + 3 * setup.micro_batch_size * setup.seq_len * rounded.outputs)


def step_bytes(own: Shard, setup: Setup) -> int:
    """Bytes that the optimizer step needs in addition to weights and states; it updates one group after another.

    ZeRO holds all averaged gradients in the dtype in which they were accumulated. For each group it makes a flat copy
    of the gradients and, if they are in bf16, an fp32 copy of that. torch's fused AdamW allocates nothing more. Without
    ZeRO there is one group. On the host, and with ``OneProcessAdamW``, a step allocates nothing on the GPU.
    """
    if setup.offload == "host":
        return 0
    copy = 4 if setup.gradient_width == 2 else 0
    updated, group = sum(own.partition), max(own.groups)
    if not setup.zero:
        return 0 if setup.zero_stage else copy * updated
    return setup.gradient_width * updated + (setup.gradient_width + copy) * group


def summed_on_host(setup: Setup) -> bool:
    """Whether the gradients of micro-batches are summed in host memory: under ZeRO-2 in the weights' own dtype."""
    return setup.zero_stage == 2 and setup.accumulation > 1 and setup.gradient_width == setup.width


def moments(
    model: ModelNumbers, teacher: ModelNumbers, layers: dict[int, LayerBytes], setup: Setup
) -> tuple[Moment, ...]:
    """The memory of one GPU at each moment of an optimizer step.

    Args:
        layers: bytes of a layer by its kind, from ``MetaModel.layer_bytes``.
    """
    own, width = shard(model, setup), setup.width
    stream = setup.micro_batch_size * setup.seq_len * model.hidden * width
    held = {
        "weights": width * (own.trained + own.frozen) - setup.spared,
        "optimizer": optimizer_bytes(own, setup),
        "teacher": teacher_bytes(teacher, setup),
    }
    temporary, handed_out = loss_bytes(model, setup)
    # The teacher's final hidden states, and both streams of each compared layer. The loss replaces these two streams by
    # their difference.
    targets = stream * (1 + 2 * setup.compared) if setup.teacher != "none" else 0
    several = setup.accumulation > 1
    # ZeRO's partition of the gradients; with the optimizer on the host, they leave the GPU tensor by tensor.
    leaves = setup.offload == "host" and (setup.zero_stage == 1 or not several or summed_on_host(setup))
    partition = 0 if leaves else setup.gradient_width * sum(own.partition)
    whole = setup.gradient_width * own.trained

    # Gradients from earlier micro-batches. ZeRO-2 keeps only this rank's partition of them.
    before = (partition if setup.zero == 2 else whole) if several else 0
    buckets = BUCKET * width * (2 if setup.overlap_comm else 1) if setup.zero else 0
    flat = min(BUCKET, own.trained) * width if setup.zero or not setup.zero_stage else 0

    if setup.recompute:
        kept = [stream * model.streams] * len(model.layers)
    else:
        kept = [layers[layer.kind].kept for layer in model.layers]
    frozen = 0 if setup.parts is None else setup.parts.frozen  # layers through which no gradient passes
    kept[:frozen] = [0] * frozen
    alive = stream + sum(kept)  # the embeddings' output and what the layers keep
    decoded = decoded_bytes(setup)
    forward = max(layers[layer.kind].forward for layer in model.layers) + decoded
    end = alive + layers[FINAL_NORM].kept
    draft = layers.get(DRAFT_HEAD)
    if draft is not None:
        end = alive = alive + draft.kept
    found = [
        Moment(
            "forward pass",
            **held,
            gradients=before,
            activations=alive - kept[-1] + forward,
            loss=targets,
        ),
        Moment(
            "loss",
            **held,
            gradients=before,
            activations=end,
            loss=targets + temporary + handed_out,
        ),
    ]
    if setup.teacher != "none":
        parts = {"gradients": before, "activations": 2 * stream + forward}
        found.append(Moment("teacher's forward pass", **held, **parts))

    grown = setup.gradient_width * model.head * (not setup.freeze_lm_head)
    for number, layer in reversed(list(enumerate(model.layers))[frozen:]):
        trained = layer.dense + layer.routed // setup.ep_size
        if setup.parts is not None:
            trained = own.trained // (len(model.layers) - frozen)
        size, gradient = layers[layer.kind], setup.gradient_width * trained
        grown += gradient
        if setup.zero == 2:
            # Reduced gradients are in the partition's buffer. At most one layer's gradients wait for their bucket.
            gradients = before + partition + gradient
        else:
            gradients = max(before, grown) + (gradient if several else 0)
        recomputed = size.kept if setup.recompute else 0
        parts = {"gradients": gradients, "activations": alive + recomputed + size.backward + decoded, "loss": targets}
        found.append(Moment(f"backward pass of layer {number}", **held, **parts, communication=buckets))
        alive -= kept[number]

    if draft is not None:
        gradients = before + partition + whole if setup.zero == 2 else whole * (1 + several)
        parts = {"gradients": gradients, "activations": alive + draft.backward, "communication": buckets}
        found.append(Moment("backward pass of the draft head", **held, **parts))
    reduced = before + partition if setup.zero == 2 else whole + (partition if setup.zero else 0)
    found.append(Moment("gradient reduction", **held, gradients=reduced, communication=buckets + flat))
    remaining = whole if setup.zero == 0 or (setup.offload == "host" and setup.zero_stage == 1) else 0
    found.append(Moment("optimizer step", **held, gradients=remaining + step_bytes(own, setup)))
    return tuple(found)


def memory(
    model: ModelNumbers, teacher: ModelNumbers, layers: dict[int, LayerBytes], setup: Setup, hardware: Hardware
) -> Memory:
    """Computes the memory of one of the run's GPUs."""
    groups = 0 if setup.world == 1 else 1 if setup.ep_size == 1 else 3
    context = CONTEXT + groups * COMMUNICATOR
    if setup.ep_size > 1:
        rows = setup.micro_batch_size * setup.seq_len * model.top_k * setup.imbalance
        sharded = 2 if setup.teacher == "sharded" else 1
        # The buffers that ``CopiesTransport`` receives into: ``BUFFERS`` of them, each ``SLACK`` times as large as the
        # largest exchange.
        buffers = copies.BUFFERS * copies.SLACK * rows * model.hidden * setup.width
        context += int(sharded * buffers)
    return Memory(moments(model, teacher, layers, setup), context, int(USABLE * hardware.memory * GIB))


def host_bytes(model: ModelNumbers, setup: Setup) -> int:
    """Most bytes of host memory of a process: while it loads, or with its optimizer on the host.

    A process loads layer by layer: it holds its shard and one whole layer. 2 GiB are added for the rest.
    """
    own = shard(model, setup)
    layer = max(layer.dense + layer.routed for layer in model.layers)
    loading = setup.width * (own.trained + own.frozen + layer) - setup.spared
    return max(loading, host_optimizer_bytes(own, setup)) + 2 * GIB


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


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def checkpoint_bytes(held: int, trained: int, width: int) -> int:
    """Bytes of a checkpoint: the weights in it, and the optimizer's states of those that train.

    The states are two moments and, for weights in bf16, the fp32 weight.

    Args:
        held: parameters of the model directory, or what trains of it beside frozen weights.
        width: bytes of a weight.
    """
    return width * held + (12 if width == 2 else 8) * trained


def saved_bytes(model: ModelNumbers, setup: Setup) -> int:
    """Bytes of a checkpoint of the run; see ``checkpoint_bytes``."""
    if setup.parts is not None:
        return checkpoint_bytes(setup.parts.trained, setup.parts.trained, setup.width)
    return checkpoint_bytes(model.total, model.total - shard(model, setup).frozen, setup.width)


def copy_bytes(model: ModelNumbers, setup: Setup) -> int:
    """Bytes that each process copies to host memory for a checkpoint that is written while the run goes on.

    With ZeRO every process has an equal share of the states. Without it, the processes that write have all states of
    their parameters. Page-locked memory is allocated in powers of two and may take up to twice as much.
    """
    own = shard(model, setup)
    if setup.zero_stage:
        return saved_bytes(model, setup) // setup.world
    if setup.parts is not None:
        return saved_bytes(model, setup)
    return checkpoint_bytes(model.total // setup.world, own.trained, setup.width)


def least_disk_bytes(model: ModelNumbers, setup: Setup) -> int:
    """Bytes of disk without which nothing of a run can be kept: one checkpoint, and beside parts what is published."""
    if setup.parts is None:
        return saved_bytes(model, setup)
    return saved_bytes(model, setup) + setup.width * (setup.parts.trained if setup.parts.drafts else model.total)


def disk_bytes(model: ModelNumbers, setup: Setup) -> int:
    """Bytes on disk: ``keep`` checkpoints, the best one, and one that is being written.

    Beside checkpoints of parts the merged model takes its own place.
    """
    more = saved_bytes(model, setup) * (setup.keep + setup.best)
    return least_disk_bytes(model, setup) + more
