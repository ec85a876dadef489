"""The teacher that is the student itself: the same weights in the standard wiring, with the adapters off.

A run that trains adapters or named parts freezes all other weights, so they stay those of the original. No second copy
is in memory. Only of the weights that train the original values are kept, and they take their places for the pass.
The first layers, if nothing trains in them and they are not rewired, are computed once for both; see ``Prefix``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.config import Objective, Recipe
from fcsd.distill.inputs import student_source, teacher_name
from fcsd.distill.teacher.targets import (
    Targets,
    TeacherSource,
    captured,
    compared_layers,
    final_hidden,
    noted,
    output_head,
    weights_sha256,
)
from fcsd.errors import ConfigError
from fcsd.models.adapters.lora import switch
from fcsd.models.adapters.targets import Chosen, shared_prefix
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import decoder_layers
from fcsd.models.desync import RankPartialLinear
from fcsd.parallel.expert.autoep import expert_blocks

Wired = tuple[type[Any], Any]  # the class of a module, and what a decoder layer reads; None in the original wiring


def require_own_weights(recipe: Recipe, teacher_weights: str) -> None:
    """Checks that the student's weights are those of the teacher, before any of them is loaded.

    Args:
        teacher_weights: ``weights_sha256`` of the teacher.

    Raises:
        ConfigError: they differ, because the recipe names another teacher or a student that was trained already.
    """
    if weights_sha256(student_source(recipe).layout) != teacher_weights:
        raise ConfigError(
            f"{recipe.frozen_beside} needs the weights of the teacher, and those of {recipe.model} differ from those "
            f"of {teacher_name(recipe)}",
            hint=f"remove `teacher:`, train a conversion that was not trained yet, or remove {recipe.frozen_beside}",
        )


class SharedTeacher(TeacherSource):
    """Computes the targets with the student's own weights.

    Args:
        parts: the student, which is wired already.
        rewire: wires a student with divided experts or sharded layers as a teacher, whose layers overlap, too; None for
            other students.
    """

    def __init__(self, parts: TrainedParts, objective: Objective, rewire: Callable[[], None] | None = None) -> None:
        model = self._model = parts.model
        self._compared = compared_layers(model, objective)
        self._adapters = list(parts.layers.values())
        # Under Desync the output projections of a layer have other classes, too.
        rows = [module for module in model.modules() if isinstance(module, RankPartialLinear)]
        self._rewired: list[Any] = [*decoder_layers(model), *rows]
        self._originals = [(parts.trained[name], original) for name, original in parts.originals.items()]
        self._modules = [vars(module) for module in model.modules()]
        # Divided blocks count the tokens of each expert. The teacher's are no part of the student's numbers.
        self._counters = [b for path in expert_blocks(model) for b in model.get_submodule(path).buffers()]
        self._standard = self._standard_layers(rewire)
        shared = shared_prefix(model, Chosen(tuple(parts.layers), tuple(parts.trained)))[1]
        # Divided experts count their tokens in each pass, and their rows may be rounded in the student's alone.
        self._prefix = 0 if self._counters or self._compared else shared

    @torch.no_grad()
    def get_targets(self, columns: dict[str, Tensor]) -> Targets:
        with self.teacher() as model, captured(model, self._compared) as streams, noted(model, self._prefix) as prefix:
            hidden = final_hidden(model, columns)
            head = output_head(model)
            if head.requires_grad:
                head = head.detach()  # still the original's, while the student's own trains
        return Targets((hidden, head), streams, *prefix)

    @contextmanager
    def teacher(self) -> Iterator[PreTrainedModel]:
        """A block in which the student is the teacher, in evaluation mode. At its end all is as before."""
        student = _wired(self._rewired)
        training = [module for module in self._modules if module["training"]]
        counters = [buffer.clone() for buffer in self._counters]
        trained = [parameter.data for parameter, _ in self._originals]
        try:
            switch(self._adapters, on=False)
            _rewire(self._rewired, self._standard)
            for parameter, original in self._originals:
                parameter.data = original
            for module in training:
                module["training"] = False
            yield self._model
        finally:
            for module in training:
                module["training"] = True
            for (parameter, _), own in zip(self._originals, trained, strict=True):
                parameter.data = own
            _rewire(self._rewired, student)
            switch(self._adapters, on=True)
            for buffer, before in zip(self._counters, counters, strict=True):
                buffer.copy_(before)

    def _standard_layers(self, rewire: Callable[[], None] | None) -> list[Wired]:
        if rewire is None:
            return [(_unwired(module), None) for module in self._rewired]
        student = _wired(self._rewired)
        rewire()
        standard = _wired(self._rewired)
        _rewire(self._rewired, student)
        return standard


def _unwired(module: Any) -> type[Any]:
    return nn.Linear if isinstance(module, RankPartialLinear) else getattr(module, "unwired", type(module))


def _wired(modules: list[Any]) -> list[Wired]:
    return [(type(module), vars(module).get("fcsd")) for module in modules]


def _rewire(modules: list[Any], wired: list[Wired]) -> None:
    for module, (cls, reads) in zip(modules, wired, strict=True):
        module.__class__ = cls
        vars(module).pop("fcsd", None)
        if reads is not None:
            vars(module)["fcsd"] = reads
