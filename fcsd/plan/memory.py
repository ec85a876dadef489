"""Memory of one GPU over an optimizer step.

Weights, optimizer states and the teacher stay in memory for the whole step. The rest changes: activations shrink in the
backward pass while gradients grow, and the optimizer has temporaries. The peak is therefore computed as the largest of
several moments, each of which is the sum of its parts. The figures are those that ``torch.cuda.max_memory_allocated``
counts from the second step on; ``Memory.context`` and ``Memory.slack`` come on top of them.

ZeRO works as in DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``) with the configuration of ``fcsd.distill.engine``:
dense parameters are partitioned over all processes, and routed experts over the ``world / ep_size`` processes that hold
the same experts.
"""

from dataclasses import dataclass

from fcsd.config.objective import automatic_chunk
from fcsd.parallel.transports import copies
from fcsd.plan.activations import LayerBytes
from fcsd.plan.model import FINAL_NORM, ModelNumbers
from fcsd.plan.setup import GIB, USABLE, Hardware, Setup

BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size
EXPERT_GROUP = 178_956_971  # parameters in one of the groups that DeepSpeed cuts experts into for its optimizer

# Beyond max_memory_allocated; assumptions, to be held against nvidia-smi and memory_reserved.
CONTEXT = int(0.8 * GIB)  # CUDA context, kernels, cuBLAS workspaces
COMMUNICATOR = int(0.5 * GIB)  # NCCL's buffers of one process group: all, expert-parallel, expert-data-parallel
SLACK = 0.1  # of what comes and goes: blocks that the caching allocator cannot reuse


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
        """What is allocated."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: value for name, value in vars(self).items() if name != "name"}


@dataclass(frozen=True)
class Memory:
    """The moments of a step, what comes on top of the fullest, and what a GPU has."""

    moments: tuple[Moment, ...]
    context: int
    usable: int

    @property
    def peak(self) -> Moment:
        """The fullest moment."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def slack(self) -> int:
        """The caching allocator's."""
        peak = self.peak
        return int(SLACK * (peak.total - peak.weights - peak.optimizer - peak.teacher))

    @property
    def total(self) -> int:
        """All that the GPU must have."""
        return self.peak.total + self.context + self.slack

    @property
    def fits(self) -> bool:
        """Whether it has that."""
        return self.total <= self.usable


@dataclass(frozen=True)
class Shard:
    """Parameters on one GPU: those trained, those frozen, and the part of the trained that its optimizer updates."""

    trained: int
    frozen: int
    partition: tuple[int, int]  # of dense parameters, of experts


def shard(model: ModelNumbers, setup: Setup) -> Shard:
    """The student's share of a GPU."""
    frozen_embedding = model.embedding if setup.freeze_embeddings else 0
    frozen_head = model.head if setup.freeze_lm_head and not model.tied else 0
    dense = model.dense - frozen_embedding - frozen_head
    routed = model.routed // setup.ep_size
    ranks = setup.world if setup.zero_stage else 1
    expert_ranks = setup.world // setup.ep_size if setup.zero_stage else 1
    partition = (-(-dense // ranks), -(-routed // expert_ranks))
    return Shard(dense + routed, frozen_embedding + frozen_head, partition)


def optimizer_bytes(own: Shard, setup: Setup) -> int:
    """AdamW's two fp32 moments, and an fp32 copy of the weights wherever DeepSpeed wraps the optimizer.

    ZeRO clones its partition also when the weights are fp32; stage 0 keeps a copy for bf16 only.
    """
    copy = 4 if setup.zero_stage or setup.dtype == "bf16" else 0
    return (8 + copy) * sum(own.partition)


def teacher_bytes(teacher: ModelNumbers, setup: Setup) -> int:
    """A frozen teacher's weights."""
    if setup.teacher == "none":
        return 0
    ranks = setup.ep_size if setup.teacher == "sharded" else 1
    return setup.width * (teacher.dense + teacher.routed // ranks)


def loss_bytes(model: ModelNumbers, setup: Setup) -> tuple[int, int]:
    """Temporaries of the loss, and the gradients that it hands out: ``fcsd.kernels.fused_kl``.

    Logits are fp32, of half a chunk at a time, of both models for KL; their gradient is of a chunk in the weights'
    dtype: 6 bytes a logit for KL in bf16, measured as 315 MB at 512 tokens and 102 400 words (docs/RESULTS.md).
    """
    tokens = setup.micro_batch_size * setup.seq_len
    logits = min(setup.chunk_tokens or automatic_chunk(model.vocab), tokens) * model.vocab
    models = 2 if "kl" in setup.terms else 1
    to_hidden = len(setup.terms) * tokens * model.hidden * setup.width
    to_head = 0 if setup.freeze_lm_head else model.head * setup.width
    return logits * (2 * models + setup.width), to_hidden + to_head


def step_bytes(model: ModelNumbers, own: Shard, setup: Setup) -> int:
    """Beyond weights and states while the optimizer steps, group after group.

    ZeRO holds all averaged gradients as they were accumulated and makes a group's flat and, for bf16, an fp32 copy of
    it; torch's fused AdamW takes nothing more. Dense parameters are one group; experts are cut into groups of at most
    ``EXPERT_GROUP`` or of one tensor that is larger. Without ZeRO all groups are one.
    """
    copy = 4 if setup.gradient_width == 2 else 0
    if not setup.zero_stage:
        return copy * sum(own.partition)
    dense, experts = own.partition
    # the largest tensor holds two of an expert's three matrices, of all experts in a layer
    tensor = 2 * max(layer.routed for layer in model.layers) // (3 * setup.ep_size)
    group = min(experts, max(EXPERT_GROUP, tensor) * setup.ep_size // setup.world)
    return setup.gradient_width * (dense + experts) + (setup.gradient_width + copy) * max(dense, group)


def moments(
    model: ModelNumbers, teacher: ModelNumbers, layers: dict[int, LayerBytes], setup: Setup
) -> tuple[Moment, ...]:
    """A step in its moments.

    Args:
        layers: what a layer of each kind keeps, from ``MetaModel.layer_bytes``.
    """
    own, width = shard(model, setup), setup.width
    stream = setup.micro_batch_size * setup.seq_len * model.hidden * width
    held = {
        "weights": width * (own.trained + own.frozen),
        "optimizer": optimizer_bytes(own, setup),
        "teacher": teacher_bytes(teacher, setup),
    }
    temporary, handed_out = loss_bytes(model, setup)
    # The teacher's final states, and of each compared layer both streams, which the loss replaces by their difference.
    targets = stream * (1 + 2 * setup.compared) if setup.teacher != "none" else 0
    several = setup.accumulation > 1
    partition = setup.gradient_width * sum(own.partition)
    whole = setup.gradient_width * own.trained

    # Gradients from earlier micro-batches, and how they grow: stage 2 parts with what other ranks own.
    before = (partition if setup.zero_stage == 2 else whole) if several else 0
    buckets = BUCKET * width * (2 if setup.overlap_comm else 1) if setup.zero_stage else 0
    flat = min(BUCKET, own.trained) * width

    if setup.recompute:
        kept = [stream * model.streams] * len(model.layers)
    else:
        kept = [layers[layer.kind].kept for layer in model.layers]
    alive = stream + sum(kept)  # the embeddings' output and what the layers keep
    forward = max(layers[layer.kind].forward for layer in model.layers)
    end = alive + layers[FINAL_NORM].kept
    found = [
        Moment("forward pass", **held, gradients=before, activations=alive - kept[-1] + forward, loss=targets),
        Moment("loss", **held, gradients=before, activations=end, loss=targets + temporary + handed_out),
    ]
    if held["teacher"]:
        found.append(Moment("teacher's forward pass", **held, gradients=before, activations=2 * stream + forward))

    grown = setup.gradient_width * model.head * (not setup.freeze_lm_head)
    for number, layer in reversed(list(enumerate(model.layers))):
        size, gradient = layers[layer.kind], setup.gradient_width * (layer.dense + layer.routed // setup.ep_size)
        grown += gradient
        if setup.zero_stage == 2:
            # What is reduced lives in the partition's buffer; at most a layer's gradients wait for their bucket.
            gradients = before + partition + gradient
        else:
            gradients = max(before, grown) + (gradient if several else 0)
        recomputed = size.kept if setup.recompute else 0
        parts = {"gradients": gradients, "activations": alive + recomputed + size.backward, "loss": targets}
        found.append(Moment(f"backward pass of layer {number}", **held, **parts, communication=buckets))
        alive -= kept[number]

    reduced = before + partition if setup.zero_stage == 2 else whole + (partition if setup.zero_stage else 0)
    found.append(Moment("gradient reduction", **held, gradients=reduced, communication=buckets + flat))
    remaining = 0 if setup.zero_stage else whole
    found.append(Moment("optimizer step", **held, gradients=remaining + step_bytes(model, own, setup)))
    return tuple(found)


def memory(
    model: ModelNumbers, teacher: ModelNumbers, layers: dict[int, LayerBytes], setup: Setup, hardware: Hardware
) -> Memory:
    """Memory of one of the run's GPUs."""
    groups = 0 if setup.world == 1 else 1 if setup.ep_size == 1 else 3
    context = CONTEXT + groups * COMMUNICATOR
    if setup.ep_size > 1:
        rows = setup.micro_batch_size * setup.seq_len * model.top_k * setup.imbalance
        sharded = 2 if setup.teacher == "sharded" else 1
        # What ``CopiesTransport`` receives into: the largest exchange's bytes, as often and as large as it makes them.
        buffers = copies.BUFFERS * copies.SLACK * rows * model.hidden * setup.width
        context += int(sharded * buffers)
    return Memory(moments(model, teacher, layers, setup), context, int(USABLE * hardware.memory * GIB))


def host_bytes(model: ModelNumbers, setup: Setup) -> int:
    """Host memory of one process while it loads layer by layer: its shard, one whole layer, and 2 GiB for the rest."""
    own = shard(model, setup)
    layer = max(layer.dense + layer.routed for layer in model.layers)
    return setup.width * (own.trained + own.frozen + layer) + 2 * GIB


def checkpoint_bytes(model: ModelNumbers, setup: Setup) -> int:
    """A checkpoint: the model directory, DeepSpeed's copy of the weights, fp32 optimizer states of what is trained."""
    own = shard(model, setup)
    trained = model.total - own.frozen
    states = 8 + (4 if setup.zero_stage or setup.dtype == "bf16" else 0)
    return 2 * setup.width * model.total + states * trained


def cache_bytes(setup: Setup) -> int:
    """The teacher cache: of each position the stored token ids with their log probabilities, and the mass of the rest.

    Positions that do not count are not stored, so this is the most that it can be.
    """
    return setup.tokens * (8 * setup.cached + 4) if setup.cached else 0


def disk_bytes(model: ModelNumbers, setup: Setup) -> int:
    """What exists at once: ``keep`` checkpoints, the best one, one that is being written, and the teacher cache."""
    return checkpoint_bytes(model, setup) * (setup.keep + setup.best + 1) + cache_bytes(setup)
