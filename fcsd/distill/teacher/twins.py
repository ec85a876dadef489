"""The teacher's own modules of a student whose trained weights ZeRO-3 divides.

ZeRO-3 gathers the weights of a module before it runs, and those of the next modules ahead, in the order in which they
ran before. A weight that had the teacher's values in one pass and the student's in the next would be gathered with the
wrong ones. So what trains has a module of its own in the teacher, whose weights are divided, too: a whole decoder layer
if anything in it trains, and otherwise the module that holds the weight. Frozen weights are shared.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fcsd.models.adapters.trained import Twin
from fcsd.models.build import decoder_layers
from fcsd.parallel.partitions import gathered, partition


def make_twins(model: PreTrainedModel, trained: Iterable[nn.Parameter]) -> tuple[Twin, ...]:
    """A twin of each module with weights of ``trained``, which ZeRO-3 has divided; all ranks call this together."""
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
