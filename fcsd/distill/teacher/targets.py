"""What the student is compared with: the teacher's final hidden states, and its streams after single layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.config import Objective, Recipe
from fcsd.distill.teacher.original import final_hidden, output_head
from fcsd.distill.top_k import TopK
from fcsd.errors import BadInputError
from fcsd.models.build import decoder_layers
from fcsd.models.selection import select_layers


class Targets(NamedTuple):
    """The teacher's part of the loss on one micro-batch.

    ``output`` is the final hidden states ``[batch, seq, hidden]`` and the output head ``[vocab, hidden]``, or what a
    cache kept of them; ``streams`` the full stream ``[batch, seq, hidden]`` after each layer that the objective
    compares, by 0-based index.
    """

    output: tuple[Tensor, Tensor] | TopK
    streams: dict[int, Tensor]


# (micro-batch, the numbers of its rows in the run) -> the teacher's part of the loss on it
Teacher = Callable[[dict[str, Tensor], Sequence[int]], Targets]


def live_teacher(model: PreTrainedModel, objective: Objective) -> Teacher:
    """The targets from a frozen model in memory."""
    layers = compared_layers(model, objective)

    @torch.no_grad()
    def targets(micro: dict[str, Tensor], _: Sequence[int]) -> Targets:
        with captured(model, layers) as streams:
            hidden = final_hidden(model, micro)
        return Targets((hidden, output_head(model)), streams)

    return targets


def compared_layers(model: PreTrainedModel, objective: Objective) -> tuple[int, ...]:
    """The layers whose streams the objective compares, none if that term has no weight."""
    if not objective.hidden.weight:
        return ()
    return select_layers(objective.hidden.layers, len(decoder_layers(model)))


@contextmanager
def captured(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """The full stream ``o_k`` after each of ``layers``, of the forward pass inside the block; none is copied.

    If the last output of a stream is still in flight, it is awaited at the end of its layer. Overlap is lost there and
    only there. The hooks compute nothing and are removed before the backward pass, so that the recompute of activation
    checkpointing does not run them again.
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
    """Check that a student and the teacher called ``name`` have what the objective compares.

    Raises:
        BadInputError: their vocabularies differ, or, for the streams, their widths or numbers of layers.
        ConfigError: ``objective.hidden.layers`` names a layer that they do not have.
    """
    pairs = [("vocabulary", *(len(output_head(model)) for model in (student, teacher)))]
    if recipe.objective.hidden.weight:
        compared_layers(student, recipe.objective)
        pairs += [
            ("number of layers", *(len(decoder_layers(model)) for model in (student, teacher))),
            ("hidden size", *(cast(Any, model.get_input_embeddings()).weight.shape[1] for model in (student, teacher))),
        ]
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise BadInputError(f"the {what} of student {recipe.model} is {ours}, that of teacher {name} {theirs}")
