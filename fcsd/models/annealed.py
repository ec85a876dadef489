"""Anneals the wiring of a model in training: a read first sees the outputs in flight, and then less and less of them.

A rewired read sees ``available + (1 - weight) * in flight``. At weight 0 it sees the full stream, as in the original
model. At weight 1 it sees what the wiring lets it see, to the last bit. Only layers in training mode are annealed, so
evaluations compute what the exported model computes. This file is not part of exported checkpoints.

While the weight is below 1, a read needs the outputs in flight, so their communication cannot be hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ConfigError
from .build import decoder_layers, wiring_of
from .wiring import LayerWiring, WiredLayer, read, wired_class
from .wiring_block import DESYNC, Wiring


@dataclass
class Annealing:
    """How far the annealing of a model has come. All layers of the model share one object.

    Attributes:
        weight: from 0, all reads see the full stream, to 1, all reads are those of the wiring.
    """

    weight: float = 1.0


@dataclass(frozen=True)
class AnnealedWiring(LayerWiring):
    """What a layer reads, and how far the annealing has come."""

    annealing: Annealing


class AnnealedLayer(WiredLayer):
    """A rewired decoder layer that sees a part of the outputs in flight while it is trained."""

    fcsd: AnnealedWiring

    def _read(self, streams: Sequence[Tensor], depth: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Like ``read``. The stream at ``depth`` is mixed with the full stream, which is the first of ``streams``."""
        available, streams = read(streams, depth)
        weight = self.fcsd.annealing.weight
        if weight < 1 and self.training and len(streams) > 1:
            # The mean of the full stream (available + in flight) and the available one, weighted by 1 - weight and
            # weight. torch.lerp is exact at both ends and computes in fp32 for bf16.
            available = torch.lerp(streams[0], available, weight)
        return available, streams


def require_in_flight(wiring: Wiring) -> None:
    """Check that a wiring lets some read miss an output, and that annealing knows how to give it back.

    Raises:
        ConfigError: the wiring is Desync, or it rewires no layer.
    """
    if wiring.name in DESYNC:
        raise ConfigError(f"the wiring {wiring.name} cannot be annealed", hint="set train.anneal_share: 0")
    if not wiring.layers or not any(wiring.reads):
        raise ConfigError("the student has no rewired layer, so nothing can be annealed", "set train.anneal_share: 0")


def anneal(model: PreTrainedModel) -> Annealing:
    """Let the rewired layers of a model be annealed. ``wire`` undoes it.

    Returns: the object whose ``weight`` the caller sets before each step; it begins with 1.

    Raises:
        ConfigError: see ``require_in_flight``.
    """
    require_in_flight(wiring_of(model.config))
    annealing = Annealing()
    layers: Any = decoder_layers(model)
    for layer in layers:
        if isinstance(layer, WiredLayer):
            plan = {field.name: getattr(layer.fcsd, field.name) for field in fields(LayerWiring)}
            layer.fcsd = AnnealedWiring(**plan, annealing=annealing)
            layer.__class__ = wired_class(AnnealedLayer, layer.unwired)
    return annealing
