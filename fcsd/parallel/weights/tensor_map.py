"""Which tensors of an expert-parallel model make up those of the original, under transformers' names and on disk.

AutoEP renames a MoE block's children and keeps gate, down and up projections of this rank's experts apart, as ``w1``,
``w2`` and ``w3``. Transformers fuses gate and up of all experts into one tensor; on disk an expert has tensors of its
own in most families, and is a row of transformers' tensor in Llama-4.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fcsd.models.build import arch_of
from fcsd.models.wiring import Blocks

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """A tensor of the original model, or one expert's row of it, and where it is.

    Args:
        name: of the original's tensor.
        parts: names in ``state``; one below the other they are the piece, or its transpose if ``transposed``.
        expert: its number in the whole model; None for what every rank has.
        local: its number on this rank; None if another rank has it.
        row: index into the first dimension of the original's tensor; None if the piece is all of it.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    expert: int | None = None
    local: int | None = None
    row: int | None = None

    @property
    def here(self) -> bool:
        """Whether this rank has it."""
        return self.expert is None or self.local is not None


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, each under the first of its names."""
    named = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


def pieces(model: PreTrainedModel) -> Iterator[Piece]:
    """The pieces of a model whose experts AutoEP has sharded, under transformers' names, all ranks' experts."""
    blocks = arch_of(model.config).blocks
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, AutoEPMoELayer)}
    for name in state(model):
        path = next((path for path in layers if name.startswith(f"{path}.")), None)
        inner = name.removeprefix(f"{path}.")
        if path is None:
            yield Piece(name, (name,))
        elif inner == "experts.w1":
            yield from _experts(f"{path}.experts", "gate_up_proj", ("w1", "w3"), layers[path], blocks.prescaled)
        elif inner == "experts.w2":
            yield from _experts(f"{path}.experts", "down_proj", ("w2",), layers[path], blocks.prescaled)
        elif inner != "experts.w3":
            yield Piece(f"{path}.{_original(inner, blocks)}", (name,))


def _experts(path: str, name: str, parts: tuple[str, ...], layer: AutoEPMoELayer, transposed: bool) -> Iterator[Piece]:
    first, count = layer.ep_rank * layer.num_local_experts, layer.num_local_experts
    for expert in range(layer.num_experts):
        local = expert - first if first <= expert < first + count else None
        names = tuple(f"{path}.{part}" for part in parts)
        yield Piece(f"{path}.{name}", names, transposed, expert, local, row=expert)


def _original(name: str, blocks: Blocks) -> str:
    """AutoEP's name inside a MoE block -> transformers'."""
    renamed = {
        "router.gate.": blocks.router,
        "router.": blocks.router,
        "shared_experts.": blocks.shared,
        "shared_experts_gate.": blocks.shared_gate,
    }
    prefix = next(prefix for prefix in renamed if name.startswith(prefix))
    return f"{renamed[prefix]}.{name.removeprefix(prefix)}"


def on_disk(model: PreTrainedModel, found: Iterable[Piece]) -> Iterator[Piece]:
    """The same pieces as they lie in files: transformers' own conversion, run backwards on the parts' numbers."""
    numbered: list[tuple[Piece, str]] = []
    probes: dict[str, list[Tensor]] = {}
    for piece in found:
        start = len(numbered)
        numbered += [(piece, part) for part in piece.parts]
        probe = torch.arange(start, len(numbered)).view(-1, 1)
        probes.setdefault(piece.name, []).append(probe.T if piece.transposed else probe)
    fused = {
        name: torch.stack(rows) if numbered[rows[0].min()][0].row is not None else rows[0]
        for name, rows in probes.items()
    }
    for name, numbers in revert_weight_conversion(model, fused).items():
        rows = list(enumerate(numbers)) if numbers.ndim == 3 else [(None, numbers)]
        for row, inside in rows:
            chosen = [numbered[number] for number in inside.flatten().tolist()]
            yield replace(chosen[0][0], name=name, parts=tuple(part for _, part in chosen), row=row)


def put(tensors: State, piece: Piece, value: Tensor) -> None:
    """Copy a piece's value into the model, cast and moved as the model's tensors are."""
    targets = _tensors(tensors, piece)
    rows = value.T if piece.transposed else value
    with torch.no_grad():
        for target, part in zip(targets, rows.split([len(target) for target in targets]), strict=True):
            target.copy_(part)


def take(tensors: State, piece: Piece) -> Tensor:
    """A piece's value, on the model's device; a view where it is one tensor."""
    parts = _tensors(tensors, piece)
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (rows.T if piece.transposed else rows).detach()


def shape(tensors: State, piece: Piece) -> tuple[int, ...]:
    """A piece's shape, whichever rank has it."""
    shapes = [tensors[part].shape[piece.expert is not None :] for part in piece.parts]
    whole = (sum(each[0] for each in shapes), *shapes[0][1:])
    return whole[::-1] if piece.transposed else whole


def _tensors(tensors: State, piece: Piece) -> list[Tensor]:
    parts = [tensors[part] for part in piece.parts]
    return parts if piece.expert is None else [part[piece.local] for part in parts]
