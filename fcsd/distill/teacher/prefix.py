"""The first layers of a model as student and teacher have them in common: the student takes the teacher's output.

Where the first layers are not rewired and nothing trains in them or before them, both compute the same in them. The
teacher's pass is first. The student's pass leaves these layers out and goes on with what they returned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from fcsd.models.build import decoder_layers


class Prefix(NamedTuple):
    """The first ``layers`` decoder layers, and what the last of them returned in the teacher's pass."""

    layers: int
    output: Any


@contextmanager
def noted(model: PreTrainedModel, layers: int) -> Iterator[list[Prefix]]:
    """Adds the prefix of ``layers`` layers in the forward pass of the block to a list; nothing without any layer."""
    found: list[Prefix] = []
    if not layers:
        yield found
        return
    last = decoder_layers(model)[layers - 1]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        # Sharded layers pass on sums in flight. All reads behind a layer that is not rewired include them.
        found.append(Prefix(layers, output.land() if hasattr(output, "land") else output))

    handle = last.register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


class _LeftOut(nn.Module):
    """The class of a layer that is left out: it returns what the last layer of the prefix returned.

    It runs no hooks, because those of ZeRO-3 would gather weights that nothing reads.
    """

    def __call__(self, *_: Any, **__: Any) -> Any:
        return vars(self)["_prefix_output"]


@contextmanager
def left_out(model: PreTrainedModel, prefix: Prefix | None) -> Iterator[None]:
    """A block in which the layers of a prefix compute nothing. At its end the layers are as before."""
    layers: list[Any] = [] if prefix is None else list(decoder_layers(model))[: prefix.layers]
    before = [(layer, type(layer), vars(layer).pop("_compiled_call_impl", None)) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = _LeftOut
            vars(layer)["_prefix_output"] = prefix and prefix.output
        yield
    finally:
        for layer, cls, compiled in before:
            layer.__class__ = cls
            del vars(layer)["_prefix_output"]
            if compiled is not None:
                vars(layer)["_compiled_call_impl"] = compiled
