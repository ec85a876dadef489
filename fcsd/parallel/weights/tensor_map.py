"""Maps the tensors of a model with divided experts to those of the original model, in transformers and on disk.

A divided MoE block holds this rank's experts under names of its own (``ExpertBlock.origin``). transformers fuses the
gate and up projections of all experts into one tensor. On disk, most families have separate tensors for each expert. In
Llama-4 an expert is a row of transformers' tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.checkpoint.weights import Held, Reader, loaded, rewritten, stored
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.expert.block import ExpertBlock, Origin

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """A tensor of the original model, or one expert's row of it, and the tensors that hold its values.

    Args:
        name: the name of the original tensor.
        parts: names in ``state``. Concatenated along the first dimension they are the piece, or its transpose.
        transposed: whether they are the transpose.
        expert: the number of the expert in the whole model; None for a tensor that every rank has.
        local: the expert's slot on this rank; None if another rank has the expert.
        row: the index into the first dimension of the original tensor; None if the piece is the whole tensor.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    expert: int | None = None
    local: int | None = None
    row: int | None = None

    @property
    def here(self) -> bool:
        """Whether this rank has the values."""
        return self.expert is None or self.local is not None


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, not copied. A tied tensor has the first of its names."""
    named = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


def pieces(model: PreTrainedModel) -> Iterator[Piece]:
    """The pieces of a model with divided experts, of all ranks, under transformers' names."""
    arch = arch_of(model.config)
    blocks = expert_blocks(model)
    for name in state(model):
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        if path is None:
            yield Piece(name, (name,))
            continue
        origin = blocks[path].origin(name.removeprefix(f"{path}."), arch.blocks)
        if origin is None:
            continue  # a later part; the first part of the original tensor stands for all parts
        if origin.of_experts:
            yield from _experts(path, origin, blocks[path], arch.blocks.prescaled)
        else:
            yield Piece(f"{path}.{origin.name}", (name,))


def _experts(path: str, origin: Origin, block: ExpertBlock, transposed: bool) -> Iterator[Piece]:
    placement, parts = block.placement, tuple(f"{path}.{part}" for part in origin.parts)
    for expert in range(placement.experts):
        local = placement.slot(expert) if placement.rank(expert) == block.rank else None
        yield Piece(f"{path}.{origin.name}", parts, transposed, expert, local, row=expert)


def on_disk(model: PreTrainedModel, found: Iterable[Piece], held: Held | None = None) -> Iterator[Piece]:
    """The same pieces under the names and in the layout of the files, without the tensors of ``apart``.

    The layout is found for small tensors that hold the numbers of the parts in place of their values.

    Args:
        held: the tensors in the files, if there are any; see ``stored``.
    """
    numbered: list[tuple[Piece, str]] = []
    probes: dict[str, list[Tensor]] = {}
    left_out = set(apart(model))
    for piece in found:
        if piece.name in left_out:
            continue
        start = len(numbered)
        numbered += [(piece, part) for part in piece.parts]
        probe = torch.arange(start, len(numbered)).view(-1, 1)
        probes.setdefault(piece.name, []).append(probe.T if piece.transposed else probe)
    fused = {
        name: torch.stack(rows) if numbered[rows[0].min()][0].row is not None else rows[0]
        for name, rows in probes.items()
    }
    for name, numbers in stored(model, fused, held).items():
        rows = list(enumerate(numbers)) if numbers.ndim == 3 else [(None, numbers)]
        for row, inside in rows:
            chosen = [numbered[number] for number in inside.flatten().tolist()]
            yield replace(chosen[0][0], name=name, parts=tuple(part for _, part in chosen), row=row)


def apart(model: PreTrainedModel) -> list[str]:
    """The tensors that files hold in another layout, but for those of experts.

    They are the convolutions of linear attention and tensors of image encoders. They are small, and files may join or
    cut them or change the order of their rows.
    """
    return rewritten(model, [name for name in state(model) if ".experts." not in name])


def outside_layers(model: PreTrainedModel) -> list[str]:
    """The names of the tensors outside of the decoder's layers: embeddings, final norm and head, and image encoders."""
    stack = f"{arch_of(model.config).classes['AutoModelForCausalLM'][1]}.layers."
    return [name for name in state(model) if not name.startswith(stack)]


def read_apart(model: PreTrainedModel, reader: Reader, held: Held) -> dict[str, Tensor]:
    """The values of the tensors of ``apart``, from files that hold the tensors ``held``."""
    tensors = state(model)
    empty = {name: torch.empty(tensors[name].shape, device="meta") for name in apart(model)}
    return loaded(model, {name: reader.tensor(name) for name in stored(model, empty, held)})


def put(tensors: State, piece: Piece, value: Tensor) -> None:
    """Copy a piece's value into the model's tensors, in their dtype and on their device."""
    targets = _tensors(tensors, piece)
    rows = value.T if piece.transposed else value
    with torch.no_grad():
        for target, part in zip(targets, rows.split([len(target) for target in targets]), strict=True):
            target.copy_(part)


def take(tensors: State, piece: Piece) -> Tensor:
    """The value of a piece on the model's device; it is a view if one tensor holds the piece."""
    parts = _tensors(tensors, piece)
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (rows.T if piece.transposed else rows).detach()


def shape(tensors: State, piece: Piece) -> tuple[int, ...]:
    """The shape of a piece; it is known also if another rank holds the values."""
    shapes = [tensors[part].shape[piece.expert is not None :] for part in piece.parts]
    whole = (sum(each[0] for each in shapes), *shapes[0][1:])
    return whole[::-1] if piece.transposed else whole


def _tensors(tensors: State, piece: Piece) -> list[Tensor]:
    parts = [tensors[part] for part in piece.parts]
    return parts if piece.expert is None else [part[piece.local] for part in parts]
