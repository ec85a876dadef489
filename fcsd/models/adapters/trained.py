"""A model with frozen weights: which tensors train beside them, and what the teacher has in their places."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..draft_head import DraftHead
from .lora import MATRICES, matrices, merge


@dataclass(frozen=True)
class TrainedParts:
    """What trains beside frozen weights. Names are those that transformers has for a whole model, or, inside of blocks
    whose experts are divided, those of the experts' own parameters.

    Attributes:
        model: the model.
        layers: ``peft``'s layers, by the name of the linear layer that each holds; empty without adapters.
        trained: the parameters of the model itself that train, by name.
        originals: the values that these had before the run, which a teacher in memory has; empty without one.
        head: a draft head beside the model, whose parameters are then all of ``trained``; None without one.
    """

    model: PreTrainedModel
    layers: dict[str, Any]
    trained: dict[str, nn.Parameter]
    originals: dict[str, Tensor]
    head: DraftHead | None = None

    def tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that trains, by the names under which checkpoints store it."""
        for name, layer in self.layers.items():
            for matrix, parameter in zip(MATRICES, matrices(layer), strict=True):
                yield f"{name}.{matrix}.weight", parameter
        yield from self.trained.items()

    def merge(self) -> dict[str, Callable[[], Tensor]]:
        """Makes the model an ordinary model again, with merged weights. The run is over then.

        Returns: what makes the weights that are still to be made, by name; see ``lora.merge``.
        """
        return merge(self.model, list(self.layers.values()))
