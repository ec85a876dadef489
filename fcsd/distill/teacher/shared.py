"""The teacher that is the student itself: the same weights in the standard wiring, with the adapters off.

A run that trains adapters or named parts freezes all other weights, so they stay those of the original. No second copy
is in memory. Only of the weights that train the original values are kept, and they take their places for the pass;
where ZeRO-3 divides the weights, the modules of ``make_twins`` do.
The first layers, if nothing trains in them and they are not rewired, are computed once for both; see ``Prefix``.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.config import Objective, Recipe
from fcsd.distill.inputs import student_source
from fcsd.distill.teacher.original import final_hidden, output_head, teacher_name, weights_sha256
from fcsd.distill.teacher.targets import FixedLosses, Targets, TeacherSource, captured, compared_layers, noted
from fcsd.errors import ConfigError
from fcsd.models.adapters.lora import switch
from fcsd.models.adapters.targets import Chosen, shared_prefix
from fcsd.models.adapters.trained import TrainedParts, Twin
from fcsd.models.build import decoder_layers
from fcsd.models.desync import RankPartialLinear
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.partitions import gathered, partition

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
        self._twins = parts.twins
        twins = [module for twin in parts.twins for module in twin.module.modules()]
        _rewire(twins, [(_unwired(module), None) for module in twins])
        self._modules = [vars(module) for module in (*model.modules(), *twins)]
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
            with in_place(self._twins):
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


class WithinPass(TeacherSource):
    """The same targets, computed inside of the student's pass over the same micro-batch.

    ZeRO-3 gathers weights ahead in the order in which modules were called between two passes of the engine. A pass of
    the teacher beside those of the engine would change the order each time. The frozen head is gathered for the loss.

    Args:
        student: the module of the engine, see ``fcsd.distill.step.engine.Student``.
    """

    def __init__(self, shared: SharedTeacher, student: Any) -> None:
        self._shared, self._student = shared, student

    def teacher(self) -> AbstractContextManager[PreTrainedModel]:
        return self._shared.teacher()

    def get_targets(self, columns: dict[str, Tensor]) -> FixedLosses:

        def losses(batch: dict[str, Tensor], denominator: Tensor, terms: tuple[str, ...]) -> dict[str, Tensor]:
            # Not by a call, whose hooks begin a pass of the engine.
            return self._student.forward(batch, self._shared.get_targets(batch), denominator, terms)

        return losses


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


def make_twins(model: PreTrainedModel, trained: Collection[nn.Parameter]) -> tuple[Twin, ...]:
    """The teacher's own modules of a student of which ZeRO-3 has divided ``trained``; all ranks call this together.

    ZeRO-3 gathers the weights of a module before it runs, and those of the next modules ahead, in the order in which
    they ran before. A weight that had the teacher's values in one pass and the student's in the next would be gathered
    with the wrong ones. So what trains has a module of its own in the teacher, whose weights are divided, too: a whole
    decoder layer if anything in it trains, and otherwise the module that holds the weight. Frozen weights are shared.
    """
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    kept |= {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    chosen = {id(weight) for weight in trained}
    for weight in trained:
        with gathered(weight):
            first = nn.Parameter(weight.detach().clone(), requires_grad=False)
        partition([first])
        kept[id(weight)] = first
    layers = set(decoder_layers(model))

    def found(parent: nn.Module) -> Iterator[Twin]:
        for name, module in parent.named_children():
            own = {id(weight) for weight in module.parameters(recurse=module in layers)}
            if own & chosen:
                yield Twin(parent, name, deepcopy(module, kept).eval())
            elif module not in layers:
                yield from found(module)

    return tuple(found(model))


@contextmanager
def in_place(twins: Sequence[Twin]) -> Iterator[None]:
    """A block in which the model has the teacher's modules. At its end it has the student's again."""
    own = [twin.parent.get_submodule(twin.name) for twin in twins]
    try:
        for twin in twins:
            twin.parent._modules[twin.name] = twin.module
        yield
    finally:
        for twin, module in zip(twins, own, strict=True):
            twin.parent._modules[twin.name] = module
