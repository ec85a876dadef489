"""Loads dense models whose weights ZeRO-3 divides among all ranks.

The model is built on the meta device, which takes no memory. Then one tensor after the other is filled on rank 0 and
sent to the others, and every rank keeps its part of it. No rank ever holds the whole model.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint.weights import Reader
from fcsd.models.build import read_generation_config, register
from fcsd.parallel.partitions import partition
from fcsd.parallel.weights.loading import empty_model, verified_layout
from fcsd.parallel.weights.random_init import drawn
from fcsd.parallel.weights.tensor_map import on_disk, pieces, read_apart, state


def load_partitioned(
    path: str | Path, *, dtype: torch.dtype, device: torch.device, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Load the directory of a dense model, in eval mode. All ranks call this; rank 0 reads the weights.

    Args:
        config: used in place of the config of the directory.

    Raises:
        BadInputError: the architecture is not supported, the checkpoint is quantised, or its tensors do not match its
            config. In all these cases nothing but headers has been read.
    """
    path = Path(path)
    layout = verified_layout(path, "ZeRO-3")
    register()
    model = empty_model(config or AutoConfig.from_pretrained(path, trust_remote_code=False), dtype)
    tensors = state(model)

    def read() -> Iterator[dict[str, Tensor]]:
        with Reader(layout) as reader:
            for piece in on_disk(model, pieces(model), layout.tensors):
                (name,) = piece.parts
                like = tensors[name]
                # Buffers are not sent, so all ranks read them.
                mine = torch.distributed.get_rank() == 0 or not isinstance(like, nn.Parameter)
                yield {name: reader.tensor(piece.name) if mine else torch.empty_like(like, device=device)}
            for name, value in read_apart(model, reader, layout.tensors).items():  # small, so all ranks read them
                yield {name: value}

    _fill(model, read(), device)
    model.generation_config = read_generation_config(path) or model.generation_config
    return model


def random_partitioned(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Like ``load_partitioned``, with the weights of ``random_model``."""
    register()
    model = empty_model(config, dtype)
    _fill(model, drawn(model, seed, device), device)
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel, values: Iterator[dict[str, Tensor]], device: torch.device) -> None:
    """Gives the tensors of a model on the meta device their values, by the names of ``state``, and divides them."""
    tensors = state(model)
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}  # tied weights remain one parameter
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False):
            places.setdefault(tensor, []).append((module, name))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for some in values:
        made = []
        for name, value in some.items():
            like = tensors[name]
            value = value.to(device, like.dtype)
            if like not in places:
                model.get_buffer(name).copy_(value)
                continue
            made.append(nn.Parameter(value, like.requires_grad))
            for module, own in places.pop(like):
                setattr(module, own, made[-1])
        partition(made)
    assert not places, "every parameter has a value"
