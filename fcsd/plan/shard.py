"""The parameters that one GPU holds, and those that its optimizer updates."""

from dataclasses import dataclass

from fcsd.plan.model import ModelNumbers
from fcsd.plan.setup import Setup

EXPERT_GROUP = 178_956_971  # most parameters of one of the groups into which DeepSpeed splits experts for its optimizer


@dataclass(frozen=True)
class Shard:
    """Numbers of parameters on one GPU.

    Attributes:
        trained: parameters that are trained.
        frozen: parameters of the student that are not trained.
        partition: trained parameters that the optimizer of this GPU updates: dense ones, and those of experts.
        group: the most parameters of experts that one group of the optimizer updates. Experts are split into groups of
            at most ``EXPERT_GROUP`` parameters before ZeRO divides them; a larger tensor is a group of its own. Dense
            parameters form one group.
        largest: parameters of the largest trained tensor.
    """

    trained: int
    frozen: int
    partition: tuple[int, int]
    group: int
    largest: int


def shard(model: ModelNumbers, setup: Setup) -> Shard:
    """The student's parameters on one GPU."""
    frozen_embedding = model.embedding if setup.freeze_embeddings else 0
    frozen_head = model.head if setup.freeze_lm_head and not model.tied else 0
    dense = model.dense - frozen_embedding - frozen_head
    routed = model.routed // setup.ep_size
    ranks = setup.world if setup.zero_stage else 1
    expert_ranks = setup.world // setup.ep_size if setup.zero_stage else 1
    partition = (-(-dense // ranks), -(-routed // expert_ranks))
    # The largest tensor of experts holds two of the three matrices of every expert in a layer.
    tensor = 2 * max(layer.routed for layer in model.layers) // (3 * setup.ep_size)
    group = min(partition[1], max(EXPERT_GROUP, tensor) // expert_ranks)
    words = [model.embedding - frozen_embedding, 0 if setup.freeze_lm_head else model.head]
    return Shard(dense + routed, frozen_embedding + frozen_head, partition, group, max(tensor, *words))
