"""Saves a model as an ordinary directory: every rank writes the tensors that it holds, and nothing is gathered.

The place of each tensor in the files follows from names and shapes alone, so the ranks need not communicate. An expert
is a range of bytes of a fused tensor. A rank needs extra memory for the largest tensor on disk that transformers
makes from the tensors in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.checkpoint import Checkpoint, compare_tensors
from fcsd.checkpoint.weights import MAX_SHARD, NAMES, Held, Reader, Shape, Writer, cut_like, names_like, stored
from fcsd.models.build import arch_of, stored_config
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.tensor import shard
from fcsd.parallel.tensor.layer import ranks_of
from fcsd.parallel.tensor.tp_plan import TensorGroup, model_shardings
from fcsd.parallel.weights.tensor_map import Piece, State, apart, on_disk, outside_layers, pieces, shape, state, take

Specs = dict[str, tuple[str, Shape]]  # name on disk -> dtype and shape, for the tensors of all ranks
Named = tuple[str, Tensor, int | None]  # name on disk, values, and their row if they are one expert of the tensor
Later = Mapping[str, Callable[[], Tensor]]


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


def own_part(model: PreTrainedModel, later: Later = MappingProxyType({})) -> OwnPart:
    """This rank's part of a model.

    Its experts are divided, or every rank holds the whole model, and nothing is copied. If decoder layers are sharded,
    all ranks must call this: whole tensors are gathered, and every rank gets its share of them, in host memory.

    Args:
        later: makes a weight that the model has on the meta device when it is written, by name. Every rank holds such a
            model whole, and makes only what it writes, one weight after the other.
    """
    if (ranks := ranks_of(model)) is not None:
        return _part_of_shards(model, ranks)
    block = next(iter(expert_blocks(model).values()), None)
    if block is None:
        return OwnPart(model, specs_of(model), lambda: _own_part(model, later), 1)
    found, ep_size, tensors = list(on_disk(model, pieces(model))), block.placement.ranks, state(model)
    others = {name: tensors[name].detach() for name in apart(model)}
    specs = _of_pieces(tensors, found) | _specs(model, {name: tensor.to("meta") for name, tensor in others.items()})
    return OwnPart(model, specs, lambda: _own_pieces(model, found, others, ep_size), ep_size)


def write_part(part: OwnPart, directory: Path, source: Path | None, max_shard: int = MAX_SHARD) -> None:
    """Write this rank's part of a model under the names that ``source`` has, or those of ``save_pretrained``.

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
        carried, theirs = Specs(), {}
        if source is not None:
            found = Checkpoint(source)
            layout = found.layout
            reader = held.enter_context(Reader(layout))
            names = compare_tensors(layout, found.config).carried
            carried = {name: (layout.tensors[name].dtype, layout.tensors[name].shape) for name in names}
            theirs = layout.tensors
        specs, tensors = _like(part, theirs)
        writer = held.enter_context(Writer(directory, {**specs, **carried}, max_shard))
        for name, value, row in tensors:
            writer.write(name, value, row)
        for turn, name in enumerate(carried):
            if _my_turn(turn):
                writer.write(name, reader.raw(name))
        if _rank() == 0:
            writer.describe()
            write_configs(part.model, directory)


def _like(part: OwnPart, held: Held) -> tuple[Specs, Iterator[Named]]:
    """The specs and tensors of a part, under the names and in the layout of files that hold the tensors ``held``."""
    own = names_like(part.model, part.specs, held)
    empty = [(own[name], torch.empty(shape, device="meta")) for name, (_, shape) in part.specs.items()]
    shapes = {name: tuple(tensor.shape) for name, tensor in cut_like(empty, held)}
    specs = {own[name]: (dtype, shapes[own[name]]) for name, (dtype, _) in part.specs.items()}
    rows: dict[str, int | None] = {}

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, value, row in part.tensors():
            rows[own[name]] = row
            yield own[name], value

    return specs, ((name, value, rows[name]) for name, value in cut_like(named(), held))


def _part_of_shards(model: PreTrainedModel, ranks: TensorGroup) -> OwnPart:
    shardings = model_shardings(model, arch_of(model.config), "whole")
    kv_heads = model.config.get_text_config().num_key_value_heads
    return _gathered_part(
        model,
        lambda name, tensor: shard.whole_shape(tensor, shardings[name], ranks.degree),
        lambda name, tensor: shard.gather(tensor.detach(), shardings[name], ranks, kv_heads),
        ranks.degree,
    )


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
    groups = _written_together(model)
    empty = {
        name: torch.empty(shape_of(name, tensor), dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }
    for turn, names in enumerate(groups):
        writer = turn % dist.get_world_size()
        if writer // degree != dist.get_rank() // degree:
            continue
        wholes = {}
        for name in names:
            whole = gather(name, tensors[name])
            if writer == dist.get_rank():
                wholes[name] = whole.to("cpu", copy=True)  # the next pass may use the gathered memory again
        own += [(name, value, None) for name, value in stored(model, wholes).items()]
    return OwnPart(model, _specs(model, empty), lambda: iter(own), degree)


def _of_pieces(tensors: State, found: list[Piece]) -> Specs:
    rows = Counter(piece.name for piece in found if piece.row is not None)
    specs: Specs = {}
    for piece in found:
        whole = shape(tensors, piece) if piece.row is None else (rows[piece.name], *shape(tensors, piece))
        specs[piece.name] = (NAMES[tensors[piece.parts[0]].dtype], whole)
    return specs


def _own_pieces(model: PreTrainedModel, found: list[Piece], others: State, ep_size: int) -> Iterator[Named]:
    """The tensors that this rank writes. If several ranks hold a tensor, one of them writes it, in turns."""
    if _rank() == 0:
        yield from ((name, value, None) for name, value in stored(model, others).items())
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
    return {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored(model, empty).items()}


def _own_part(model: PreTrainedModel, later: Later) -> Iterator[Named]:
    """The tensors that this rank writes of a model that every rank holds."""
    tensors = state(model)
    for turn, names in enumerate(_written_together(model)):
        if _my_turn(turn):
            held = {name: later[name]() if name in later else tensors[name].detach() for name in names}
            yield from ((name, value, None) for name, value in stored(model, held).items())


def _written_together(model: PreTrainedModel) -> list[list[str]]:
    """The names of a model's tensors in the groups that files may join: each tensor of a text layer, and all others."""
    outside = outside_layers(model)
    left_out = set(outside)
    return [outside, *([name] for name in state(model) if name not in left_out)]


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
