"""A model in training, and the processes that train it: which of them shard it, and which divide the rows.

Each group of ``parallel.tp_size`` neighbouring processes shards the decoder layers of student and teacher, and computes
with the same rows. The processes at the same place of these groups have the same part of the weights. They are the data
parallel processes: they divide the rows, average the gradients, and divide the optimizer's states by ZeRO.
"""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from fcsd.config import Recipe
from fcsd.launch.world import World
from fcsd.models.adapters.trained import TrainedParts
from fcsd.parallel.tensor.shard import prepare
from fcsd.parallel.tensor.tp_plan import TensorGroup

TrainEngine = Any  # DeepSpeed's engine, whose package has no types


@dataclass(frozen=True)
class Trained:
    """A model in training.

    Attributes:
        engine: runs its passes and its optimizer's steps.
        model: the model inside of the engine.
        parts: what trains beside frozen weights; None if all weights train.
    """

    engine: TrainEngine
    model: PreTrainedModel
    parts: TrainedParts | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Teams:
    """How this process works together with the others.

    Attributes:
        data: the processes that divide the rows, of which this is one; all processes without tensor parallelism.
        ranks: the processes that shard the models together with this one; None without tensor parallelism.
        small: the same processes in a group of their own, for the gradients of small weights.
    """

    data: World
    ranks: TensorGroup | None = None
    small: Any = None

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that shard a model. DeepSpeed calls this method and the following ones."""
        assert self.ranks is not None, "DeepSpeed gets the teams of a run with tensor parallelism only"
        return self.ranks.degree

    def get_model_parallel_rank(self) -> int:
        """The place of this rank among those that shard a model."""
        assert self.ranks is not None
        return self.ranks.rank

    def get_model_parallel_group(self) -> Any:
        """The ranks that shard a model, as a process group."""
        assert self.ranks is not None
        return self.ranks.group

    def get_data_parallel_world_size(self) -> int:
        """The number of ranks that divide the rows."""
        return self.data.size

    def get_data_parallel_rank(self) -> int:
        """The place of this rank among those that divide the rows."""
        return self.data.rank

    def get_data_parallel_group(self) -> Any:
        """The ranks that divide the rows, as a process group."""
        return self.data.group


def teams_of(recipe: Recipe, world: World) -> Teams:
    """The teams of this process. All processes call this, because process groups are made."""
    degree = recipe.parallel.tp_size
    if degree == 1:
        return Teams(world)
    place, first = world.rank % degree, world.rank - world.rank % degree
    found: dict[Any, Any] = {}
    for start in range(0, world.size, degree):
        for kind in ("large", "small"):
            found[kind, start] = dist.new_group(list(range(start, start + degree)))
    for offset in range(degree):
        found["data", offset] = dist.new_group(list(range(offset, world.size, degree)))
    data = World(world.rank // degree, world.size // degree, world.device, found["data", place])
    return Teams(data, TensorGroup(found["large", first], degree, place), found["small", first])


def make_trainable(model: PreTrainedModel, teams: Teams) -> None:
    """Marks what is sharded, and lets gradients that a rank has a part of be summed. See ``shard.prepare``.

    Without tensor parallelism it does nothing.
    """
    if teams.ranks is not None:
        prepare(model, teams.ranks, teams.small)
