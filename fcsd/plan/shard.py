"""The parameters that one GPU holds, and those that its optimizer updates."""

from dataclasses import dataclass

from fcsd.parallel.partitions import GROUP
from fcsd.plan.model import ModelNumbers
from fcsd.plan.setup import Parts, Setup

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
    own = parts.own - parts.routed + routed
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
