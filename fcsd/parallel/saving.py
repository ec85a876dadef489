"""An expert-parallel model written as an ordinary directory: every rank writes what it has, nothing is gathered.

Where each tensor lies in which file follows from names and shapes alone, so ranks need not talk; an expert of a fused
tensor is a range of bytes in it. A rank's extra memory is one tensor, on the host.
"""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from transformers import PreTrainedModel

from ..checkpoint import compare_tensors, read_config, read_layout
from ..checkpoint.weights import MAX_SHARD, NAMES, Reader, Shape, Writer
from .pieces import Piece, State, on_disk, pieces, shape, state, take


def save_expert_parallel(
    model: PreTrainedModel, directory: Path, source: Path | None = None, max_shard: int = MAX_SHARD
) -> None:
    """Write weights under their original names, and the configs, as ``save_pretrained`` of the whole model would.

    Every rank calls it and returns when its own part is on the disk; the directory is whole when all have. It has to
    be one that all ranks see, and that nobody takes for a checkpoint yet.

    Args:
        directory: exists, empty.
        source: the checkpoint that the model came from; tensors in it that transformers does not load (layers of
            multi-token prediction) are copied.
        max_shard: bytes in a file, but for a single larger tensor.
    """
    tensors = state(model)
    found = list(on_disk(model, pieces(model)))
    specs = _specs(tensors, found)
    ep_size = next(module.ep_size for module in model.modules() if isinstance(module, AutoEPMoELayer))
    with ExitStack() as held:
        carried: dict[str, tuple[str, Shape]] = {}
        if source is not None:
            layout = read_layout(source)
            reader = held.enter_context(Reader(layout))
            carried = {
                name: (layout.tensors[name].dtype, layout.tensors[name].shape)
                for name in compare_tensors(layout, read_config(source)).carried
            }
        writer = held.enter_context(Writer(directory, {**specs, **carried}, max_shard))
        turns = {name: turn for turn, name in enumerate([*specs, *carried])}
        for piece in found:
            if _mine(piece, turns[piece.name], ep_size):
                writer.write(piece.name, take(tensors, piece), piece.row)
        for name in carried:
            if turns[name] % dist.get_world_size() == dist.get_rank():
                writer.write(name, reader.raw(name))
        if dist.get_rank() == 0:
            writer.describe()
            _write_configs(model, directory)


def _specs(tensors: State, found: list[Piece]) -> dict[str, tuple[str, Shape]]:
    """Name on disk -> dtype and shape, of all ranks' tensors."""
    specs: dict[str, tuple[str, Shape]] = {}
    rows: Counter[str] = Counter(piece.name for piece in found if piece.row is not None)
    for piece in found:
        whole = shape(tensors, piece) if piece.row is None else (rows[piece.name], *shape(tensors, piece))
        specs[piece.name] = (NAMES[tensors[piece.parts[0]].dtype], whole)
    return specs


def _mine(piece: Piece, turn: int, ep_size: int) -> bool:
    """Whether this rank writes it: of the ranks that have it one, by turns."""
    if piece.expert is None:
        return turn % dist.get_world_size() == dist.get_rank()
    replica, replicas = dist.get_rank() // ep_size, dist.get_world_size() // ep_size
    return piece.here and turn % replicas == replica


def _write_configs(model: PreTrainedModel, directory: Path) -> None:
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
