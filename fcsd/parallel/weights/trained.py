"""The tensors of a checkpoint's ``parts/``: whole ones, under the names that transformers has for a whole model.

Every rank may have all of a tensor. If not, tensor parallelism divides it among those of a model, or it has the
experts that a rank holds. A whole tensor is then made when it is saved, one after the other, and
the ranks take turns to keep them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcsd.errors import CheckpointError
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.tensor import shard
from fcsd.parallel.tensor.layer import ranks_of
from fcsd.parallel.tensor.tp_plan import Sharding, TensorGroup, model_shardings, own_part
from fcsd.parallel.weights.saving import Named, OwnPart


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of ``parts/``, and how this rank's part becomes the whole and the other way round.

    Attributes:
        shape: the shape of the whole.
        degree: how many neighbouring ranks hold the whole together; 1 if each has all of it.
        read: the whole, on the model's device; the ranks that hold it together call this together.
        take: takes this rank's part of the whole; they call this together, too.
    """

    name: str
    shape: tuple[int, ...]
    degree: int
    read: Callable[[], Tensor]
    take: Callable[[Tensor], Any]


def trained_part(parts: TrainedParts) -> OwnPart:
    """What trains beside frozen weights, as this rank writes it.

    Rank 0 writes what every rank has, and nothing of it is copied. The ranks take turns with all other tensors, which
    are copied to the host; all ranks must call this.
    """
    found = list(whole_tensors(parts, ranks_of(parts.model)))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own: list[Named] = []
    for turn, tensor in enumerate(found):
        writer = turn % world if tensor.degree > 1 else 0
        if tensor.degree > 1 and writer // tensor.degree == rank // tensor.degree:
            whole = tensor.read()
            own += [(tensor.name, whole.to("cpu", copy=True), None)] if writer == rank else []
        elif tensor.degree == 1 and rank == 0:
            own.append((tensor.name, tensor.read(), None))
    return OwnPart(parts.model, {}, lambda: iter(own), max((tensor.degree for tensor in found), default=1))


@torch.no_grad()
def load_trained(
    parts: TrainedParts, values: Mapping[str, Tensor], source: str, ranks: TensorGroup | None = None
) -> None:
    """Takes the values of a checkpoint. All ranks call this together.

    Args:
        ranks: the ranks that shard the model; None if every rank has it.

    Raises:
        CheckpointError: they are not those of these parts; ``source`` says where they come from.
    """
    own = list(whole_tensors(parts, ranks))
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    if shapes != (expected := {tensor.name: tensor.shape for tensor in own}):
        name = min(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        has, needs = shapes.get(name), expected.get(name)
        raise CheckpointError(f"{source}: {name} has the shape {has}, and this run needs {needs}")
    for tensor in own:
        tensor.take(values[tensor.name])


def whole_tensors(parts: TrainedParts, ranks: TensorGroup | None) -> Iterator[WholeTensor]:
    """The tensors that train, in the same order on all ranks."""
    model = parts.model
    shardings: dict[str, Sharding] = {}
    if ranks is not None:
        shardings = model_shardings(model, arch_of(model.config), "whole")
    blocks = expert_blocks(model)
    for name, weight in parts.tensors():
        path = next((path for path in blocks if name.startswith(f"{path}.experts.")), None)
        if path is not None:
            origin = blocks[path].origin(name.removeprefix(f"{path}."), arch_of(model.config).blocks)
            if origin is not None:  # otherwise the first part of the original tensor stands for this one, too
                weights = [model.get_parameter(f"{path}.{part}") for part in origin.parts]
                transposed = arch_of(model.config).blocks.prescaled
                yield _of_experts(f"{path}.{origin.name}", weights, blocks[path], transposed)
        elif ranks is not None and name in shardings:  # a draft head is beside the model
            yield _sharded(name, weight, shardings[name], ranks, model.config.get_text_config().num_key_value_heads)
        else:
            yield WholeTensor(name, tuple(weight.shape), 1, weight.detach, weight.data.copy_)


def _sharded(name: str, weight: nn.Parameter, sharding: Sharding, ranks: TensorGroup, kv_heads: int) -> WholeTensor:
    return WholeTensor(
        name,
        tuple(shard.whole_shape(weight, sharding, ranks.degree)),
        ranks.degree,
        lambda: shard.gather(weight.detach(), sharding, ranks, kv_heads),
        lambda value: weight.data.copy_(own_part(value, sharding, ranks, kv_heads)),
    )


def _of_experts(name: str, weights: list[nn.Parameter], block: ExpertBlock, transposed: bool) -> WholeTensor:
    """All experts of a layer in one tensor, which transformers makes of one or two tensors of a rank's experts."""
    placement = block.placement
    rows = [weight.shape[1] for weight in weights]
    one = (sum(rows), weights[0].shape[2])
    shape = (placement.experts, *(one[::-1] if transposed else one))

    def read() -> Tensor:
        mine = torch.cat([weight.detach() for weight in weights], dim=1)
        parts = [torch.empty_like(mine) for _ in range(placement.ranks)]
        dist.all_gather(parts, mine, group=block.group)
        experts = range(placement.experts)
        whole = torch.stack([parts[placement.rank(expert)][placement.slot(expert)] for expert in experts])
        return whole.transpose(1, 2) if transposed else whole

    def take(value: Tensor) -> None:
        for expert in range(placement.experts):
            if placement.rank(expert) == block.rank:
                mine = (value[expert].T if transposed else value[expert]).split(rows)
                for weight, part in zip(weights, mine, strict=True):
                    weight.data[placement.slot(expert)].copy_(part)

    return WholeTensor(name, shape, placement.ranks, read, take)
