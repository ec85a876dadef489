"""A model with frozen weights: which tensors train beside them, and the values that the model's own had before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import CheckpointError
from .lora import MATRICES, Changed, matrices, merge


@dataclass(frozen=True)
class TrainedParts:
    """What trains beside frozen weights. All names are those that transformers has for a whole model.

    Attributes:
        model: the model. Every rank has all that trains.
        layers: ``peft``'s layers, by the name of the linear layer that each holds; empty without adapters.
        trained: the parameters of the model itself that train, by name.
        originals: the values that these had before the run, which a teacher in memory has; empty without one.
    """

    model: PreTrainedModel
    layers: dict[str, Any]
    trained: dict[str, nn.Parameter]
    originals: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that trains, by the names under which checkpoints store it."""
        for name, layer in self.layers.items():
            for matrix, parameter in zip(MATRICES, matrices(layer), strict=True):
                yield f"{name}.{matrix}.weight", parameter
        yield from self.trained.items()

    @torch.no_grad()
    def load(self, values: dict[str, Tensor], source: str) -> None:
        """Takes the values of a checkpoint.

        Raises:
            CheckpointError: they are not those of these parts; ``source`` says where they come from.
        """
        own = dict(self.tensors())
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        if shapes != (expected := {name: tuple(parameter.shape) for name, parameter in own.items()}):
            name = min(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
            has, needs = shapes.get(name), expected.get(name)
            raise CheckpointError(f"{source}: {name} has the shape {has}, and this run needs {needs}")
        for name, parameter in own.items():
            parameter.data.copy_(values[name])

    def merge(self, changed: Changed) -> None:
        """Makes the model an ordinary model again, with merged weights. The run is over then.

        Args:
            changed: gives a block in which weights are whole and may be changed.
        """
        merge(self.model, list(self.layers.values()), changed)
