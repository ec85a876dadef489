"""Saves a model as an ordinary directory: every rank writes the tensors that it holds, and nothing is gathered.

The place of each tensor in the files follows from names and shapes alone, so the ranks need not communicate. An expert
is a range of bytes of a fused tensor. A rank needs extra memory for the largest tensor on disk that transformers
makes from the tensors in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fcsd.checkpoint import compare_tensors, read_config, read_layout
from fcsd.checkpoint.weights import MAX_SHARD, NAMES, Reader, Shape, Writer
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import arch_of, stored_config
from fcsd.parallel.expert.block import expert_blocks
from fcsd.parallel.partitions import gathered, is_partitioned, whole_shape
from fcsd.parallel.tensor import shard
from fcsd.parallel.tensor.layer import ranks_of
from fcsd.parallel.tensor.tp_plan import TensorGroup, model_shardings
from fcsd.parallel.weights.tensor_map import Piece, State, on_disk, pieces, shape, state, take

Specs = dict[str, tuple[str, Shape]]  # name on disk -> dtype and shape, for the tensors of all ranks
Named = tuple[str, Tensor, int | None]  # name on disk, values, and their row if they are one expert of the tensor


@dataclass(frozen=True)
class OwnPart:
    """The part of a model that this rank writes.

    Attributes:
        model: the model. Only its configs are read from it.
        specs: the tensors that all ranks write together.
        tensors: yields the tensors of this rank, on the model's device. They are made one after the other.
        group_size: the number of ranks that hold the model together. Every such group of ranks holds the same model.
    """

    model: PreTrainedModel
    specs: Specs
    tensors: Callable[[], Iterator[Named]]
    group_size: int


def own_part(model: PreTrainedModel) -> OwnPart:
    """This rank's part of a model.

    Its experts are divided, or every rank holds the whole model, and nothing is copied. If decoder layers are sharded,
    or ZeRO-3 divides all weights, all ranks must call this: whole tensors are gathered, and every rank gets its share
    of them, in host memory.
    """
    if (ranks := ranks_of(model)) is not None:
        return _part_of_shards(model, ranks)
    if any(map(is_partitioned, model.parameters())):
        return _gathered_part(model, lambda _, tensor: whole_shape(tensor), _whole, dist.get_world_size())
    block = next(iter(expert_blocks(model).values()), None)
    if block is None:
        return OwnPart(model, specs_of(model), lambda: _own_part(model), 1)
    found, ep_size = list(on_disk(model, pieces(model))), block.placement.ranks
    return OwnPart(model, _of_pieces(state(model), found), lambda: _own_pieces(model, found, ep_size), ep_size)


def trained_part(parts: TrainedParts) -> OwnPart:
    """What trains beside frozen weights, which every rank holds and rank 0 writes. Nothing is copied."""

    def tensors() -> Iterator[Named]:
        if _rank() == 0:
            for name, parameter in parts.tensors():
                yield name, parameter.detach(), None

    return OwnPart(parts.model, {}, tensors, 1)


def write_part(part: OwnPart, directory: Path, source: Path | None = None, max_shard: int = MAX_SHARD) -> None:
    """Write this rank's part of a model under the original names, as ``save_pretrained`` of the whole model would.

    Rank 0 writes the configs as well.

    Every rank calls this function, which does not communicate. The directory is complete when all ranks have returned
    and each has its part on the disk.

    Args:
        directory: an empty directory on a disk that all ranks share. It must not be read before it is complete.
        source: the checkpoint from which the model was loaded. Tensors of it that transformers does not load (layers
            of multi-token prediction) are copied.
        max_shard: the largest size of a file in bytes, unless a single tensor is larger.
    """
    with ExitStack() as held:
        carried: Specs = {}
        if source is not None:
            layout = read_layout(source)
            reader = held.enter_context(Reader(layout))
            names = compare_tensors(layout, read_config(source)).carried
            carried = {name: (layout.tensors[name].dtype, layout.tensors[name].shape) for name in names}
        writer = held.enter_context(Writer(directory, {**part.specs, **carried}, max_shard))
        for name, value, row in part.tensors():
            writer.write(name, value, row)
        for turn, name in enumerate(carried):
            if _my_turn(turn):
                writer.write(name, reader.raw(name))
        if _rank() == 0:
            writer.describe()
            write_configs(part.model, directory)


def _part_of_shards(model: PreTrainedModel, ranks: TensorGroup) -> OwnPart:
    shardings = model_shardings(model, arch_of(model.config), "whole")
    kv_heads = model.config.get_text_config().num_key_value_heads
    return _gathered_part(
        model,
        lambda name, tensor: shard.whole_shape(tensor, shardings[name], ranks.degree),
        lambda name, tensor: shard.gather(tensor.detach(), shardings[name], ranks, kv_heads),
        ranks.degree,
    )


def _whole(_: str, tensor: Tensor) -> Tensor:
    with gathered(tensor):
        return tensor.detach()


def _gathered_part(
    model: PreTrainedModel,
    shape_of: Callable[[str, Tensor], Sequence[int]],
    gather: Callable[[str, Tensor], Tensor],
    degree: int,
) -> OwnPart:
    """The tensors that this rank writes of a model that each ``degree`` ranks hold together. The ranks take turns.

    Args:
        shape_of: the shape of a whole tensor, from its name and what this rank has of it.
        gather: a whole tensor, from the same; the ranks that hold it together call this together.
    """
    tensors, own = state(model), []
    empty = {
        name: torch.empty(shape_of(name, tensor), dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }
    for turn, (name, tensor) in enumerate(tensors.items()):
        writer = turn % dist.get_world_size()
        if writer // degree != dist.get_rank() // degree:
            continue
        whole = gather(name, tensor)
        if writer == dist.get_rank():
            # Not the gathered memory itself, which the next pass may use again.
            stored = revert_weight_conversion(model, {name: whole.to("cpu", copy=True)})
            own += [(on_disk_name, value, None) for on_disk_name, value in stored.items()]
    return OwnPart(model, _specs(model, empty), lambda: iter(own), degree)


def _of_pieces(tensors: State, found: list[Piece]) -> Specs:
    rows = Counter(piece.name for piece in found if piece.row is not None)
    specs: Specs = {}
    for piece in found:
        whole = shape(tensors, piece) if piece.row is None else (rows[piece.name], *shape(tensors, piece))
        specs[piece.name] = (NAMES[tensors[piece.parts[0]].dtype], whole)
    return specs


def _own_pieces(model: PreTrainedModel, found: list[Piece], ep_size: int) -> Iterator[Named]:
    """The tensors that this rank writes. If several ranks hold a tensor, one of them writes it, in turns."""
    tensors = state(model)
    replica, replicas = dist.get_rank() // ep_size, dist.get_world_size() // ep_size
    for turn, piece in enumerate(found):
        if _my_turn(turn) if piece.expert is None else piece.here and turn % replicas == replica:
            yield piece.name, take(tensors, piece), piece.row


def specs_of(model: PreTrainedModel) -> Specs:
    """The tensors on disk of a model whose experts are not divided. The model may be on the meta device."""
    return _specs(model, {name: tensor.detach().to("meta") for name, tensor in state(model).items()})


def _specs(model: PreTrainedModel, empty: dict[str, Tensor]) -> Specs:
    """The tensors on disk of a model with these tensors on the meta device."""
    return {
        name: (NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in revert_weight_conversion(model, empty).items()
    }


def _own_part(model: PreTrainedModel) -> Iterator[Named]:
    """The tensors that this rank writes of a model that every rank holds."""
    for turn, (name, tensor) in enumerate(state(model).items()):
        if _my_turn(turn):
            for on_disk_name, value in revert_weight_conversion(model, {name: tensor.detach()}).items():
                yield on_disk_name, value, None


def _my_turn(turn: int) -> bool:
    return not dist.is_initialized() or turn % dist.get_world_size() == dist.get_rank()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0  # `fcsd export` is a process of its own


def write_configs(model: PreTrainedModel, directory: Path) -> None:
    """The JSON files that ``save_pretrained`` writes beside the weights."""
    config = stored_config(model)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
