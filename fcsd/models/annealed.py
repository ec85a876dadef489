"""Anneals the wiring of a model in training: a read first sees the outputs in flight, and then less and less of them.

A rewired read sees ``available + (1 - weight) * in flight``. At weight 0 it sees the full stream, as in the original
model. At weight 1 it sees what the wiring lets it see, to the last bit. Only layers in training mode are annealed, so
evaluations compute what the exported model computes. This file is not part of exported checkpoints.

While the weight is below 1, a read needs the outputs in flight, so their communication cannot be hidden. A layer that
overlaps communication with computation runs as a blocking layer until then.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ConfigError
from .build import decoder_layers, wiring_of
from .class_swap import with_mixin
from .wiring import WiredLayer, pass_on, read
from .wiring_block import DESYNC, Wiring


class Annealing:
    """How far the annealing of a model has come. All layers of the model share one object.

    Attributes:
        mixes: whether the weight is below 1.
        tensor: the weight, ``[]`` in fp32, for compiled layers: they would be compiled again for each new number.
    """

    def __init__(self, weight: float = 1.0, device: torch.device | None = None) -> None:
        self.tensor = torch.empty((), device=device)
        self.weight = weight

    @property
    def weight(self) -> float:
        """From 0, all reads see the full stream, to 1, all reads are those of the wiring."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight, self.mixes = weight, weight < 1
        self.tensor.fill_(weight)


class AnnealedLayer(WiredLayer):
    """A rewired decoder layer that sees a part of the outputs in flight while it is trained."""

    annealing: Annealing

    def forward(self, hidden_states: Tensor | tuple[Tensor, ...], *given: Any, **kwargs: Any) -> Any:
        if self._is_annealed():
            blocking = partial(WiredLayer.forward, self)  # also if the layer's class overlaps
            blocks = self.fcsd.blocks
            run = blocking if blocks.passes is None else partial(pass_on, blocks, blocking)
            return run(hidden_states, *given, **kwargs)
        return super().forward(hidden_states, *given, **kwargs)

    def _is_annealed(self) -> bool:
        return self.training and self.annealing.mixes

    def _read(self, streams: Sequence[Tensor], depth: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Like ``read``. The stream at ``depth`` is mixed with the full stream, which is the first of ``streams``."""
        available, streams = read(streams, depth)
        if self._is_annealed() and len(streams) > 1:
            # The mean of the full stream (available + in flight) and the available one, weighted by 1 - weight and
            # weight. torch.lerp is exact at both ends and computes in fp32 for bf16.
            if torch.compiler.is_compiling():  # a compiler fuses the casts, without which bf16 would round the weight
                dtype = available.dtype
                wide = torch.promote_types(dtype, torch.float32)
                weight = self.annealing.tensor.to(wide)
                available = torch.lerp(streams[0].to(wide), available.to(wide), weight).to(dtype)
            else:
                available = torch.lerp(streams[0], available, self.annealing.weight)
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
    """Let the rewired layers of a model be annealed, also those that a parallel runtime has wired. ``wire`` undoes it.

    Returns: the object whose ``weight`` the caller sets before each step; it begins with 1.

    Raises:
        ConfigError: see ``require_in_flight``.
    """
    require_in_flight(wiring_of(model.config))
    annealing = Annealing(device=model.device)
    wired: list[Any] = [layer for layer in decoder_layers(model) if isinstance(layer, WiredLayer)]
    for layer in wired:
        layer.__class__ = with_mixin(AnnealedLayer, type(layer))
        layer.annealing = annealing
    return annealing
