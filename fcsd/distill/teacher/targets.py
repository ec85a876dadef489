"""The targets of the student, and where they come from: a ``TeacherSource``.

A run has one source. This module has that of a teacher in memory. ``fcsd.distill.teacher.shared`` computes targets
with the student's own weights.

Where the first layers are not rewired and nothing trains in them or before them, student and teacher compute the same
in them. The teacher's pass is first. The student's pass leaves these layers out and goes on with what they returned.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.config import Objective, Recipe
from fcsd.distill.teacher.original import final_hidden, output_head
from fcsd.errors import BadInputError
from fcsd.models.build import decoder_layers, logits_cap
from fcsd.models.selection import select_layers


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
    """The class of a layer that is left out: it returns what the last layer of the prefix returned, without hooks."""

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


class Targets(NamedTuple):
    """The teacher's outputs that the loss needs on one micro-batch.

    Attributes:
        output: the final hidden states ``[batch, seq, hidden]`` and the output head ``[vocab, hidden]``.
        streams: the full stream ``[batch, seq, hidden]`` after each layer that the objective compares, by the 0-based
            index of the layer.
        prefix: the first layers, if the student is to take the teacher's output of them.
    """

    output: tuple[Tensor, Tensor]
    streams: dict[int, Tensor]
    prefix: Prefix | None = None


class TeacherSource:
    """Gives the targets of the student, whatever is behind it. This class itself is the source without a teacher."""

    def get_targets(self, columns: dict[str, Tensor]) -> Targets | None:
        """What ``Student.forward`` takes as the targets on a micro-batch.

        Args:
            columns: the columns of the micro-batch, on the device.
        """
        return None

    @contextmanager
    def teacher(self) -> Iterator[PreTrainedModel | None]:
        """A block in which a model in memory is the teacher; None if there is no such model."""
        yield None


class LiveTeacher(TeacherSource):
    """Computes the targets with a frozen model in memory."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        self._model, self._layers = model, compared_layers(model, objective)

    @torch.no_grad()
    def get_targets(self, columns: dict[str, Tensor]) -> Targets:
        with captured(self._model, self._layers) as streams:
            return Targets((final_hidden(self._model, columns), output_head(self._model)), streams)

    @contextmanager
    def teacher(self) -> Iterator[PreTrainedModel]:
        yield self._model


def compared_layers(model: PreTrainedModel, objective: Objective) -> tuple[int, ...]:
    """The 0-based indices of the layers whose streams the objective compares; none if that term has no weight."""
    if not objective.hidden.weight:
        return ()
    return select_layers(objective.hidden.layers, len(decoder_layers(model)))


@contextmanager
def captured(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects the full stream ``o_k`` after each of ``layers`` in the forward pass inside the block, without copies.

    If the last output of a layer is still in flight, it is awaited at the end of that layer. Only the captured layers
    lose their overlap. The hooks compute nothing. They are removed before the backward pass, so that the recompute of
    activation checkpointing does not run them again.
    """
    streams: dict[int, Tensor] = {}

    def hook(index: int) -> Callable[..., None]:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            full = output[0] if isinstance(output, tuple) else output
            streams[index] = full if isinstance(full, Tensor) else full.land()

        return keep

    modules = decoder_layers(model)
    handles = [modules[index].register_forward_hook(hook(index)) for index in layers]
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def expect_comparable(student: PreTrainedModel, teacher: PreTrainedModel, recipe: Recipe, name: str) -> None:
    """Checks that the objective can compare a student with the teacher called ``name``.

    Raises:
        BadInputError: the sizes of their vocabularies, or the caps of their logits, differ. If streams are compared,
            also if their hidden sizes or numbers of layers differ.
        ConfigError: ``objective.hidden.layers`` names a layer that the models do not have.
    """
    both = student, teacher
    pairs: list[tuple[Any, ...]] = [
        ("vocabulary", *(output_head(model).shape[0] for model in both)),
        ("cap of the logits", *(logits_cap(model.config) for model in both)),
    ]
    if recipe.objective.hidden.weight:
        compared_layers(student, recipe.objective)
        pairs += [
            ("number of layers", *(len(decoder_layers(model)) for model in both)),
            ("hidden size", *(cast(Any, model.get_input_embeddings()).weight.shape[1] for model in both)),
        ]
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise BadInputError(f"the {what} of student {recipe.model} is {ours}, that of teacher {name} {theirs}")
