"""A model in training, as its checkpoints and the moves of its experts see it."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from fcsd.models.adapters.trained import TrainedParts

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
