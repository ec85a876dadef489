"""Freezes the student of a run but for what trains: adapters, named parts, or both."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fcsd.checkpoint import Checkpoint
from fcsd.config import Recipe
from fcsd.distill.student import meta_student
from fcsd.distill.teacher.original import needs_teacher
from fcsd.extras import require_extra
from fcsd.models.adapters.lora import add_adapters
from fcsd.models.adapters.targets import Chosen, choose, choose_parts
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import expert_blocks


def chosen_parts(recipe: Recipe, source: Checkpoint) -> Chosen | None:
    """What trains beside frozen weights, by the names in the recipe; None if all weights train. No weight is read.

    Args:
        source: the checkpoint that the student is made from.

    Raises:
        ConfigError: ``peft`` is not installed, or the recipe names a part that the model does not have.
    """
    if recipe.frozen_beside is None:
        return None
    model, parts = meta_student(recipe, source), recipe.optim.train
    if (adapter := recipe.train.adapter) is None:
        return choose_parts(model, parts, divided=recipe.parallel.ep_size > 1)
    require_extra("train", "train.adapter", "peft")
    return choose(model, adapter.targets, parts, adapter.layers)


def train_parts(model: PreTrainedModel, recipe: Recipe, chosen: Chosen) -> TrainedParts:
    """Freezes everything but ``chosen.trained`` in a student that has just been loaded, and puts adapters into it.

    The values of the adapters are the same on every rank and at any ``parallel.ep_size``.
    """
    parameters, paths = _by_name(model)
    model.requires_grad_(False)
    trained = {name: parameters[name] for name in chosen.trained}
    for parameter in trained.values():
        parameter.requires_grad_()
    originals = {name: p.detach().clone() for name, p in trained.items()} if needs_teacher(recipe) else {}
    places = {name: paths[f"{name}.weight"].removesuffix(".weight") for name in chosen.adapted}
    layers: dict[str, Any] = {}
    if (adapter := recipe.train.adapter) is not None:
        layers = add_adapters(model, places, adapter.rank, adapter.factor * adapter.rank, recipe.seed)
    return TrainedParts(model, layers, trained, originals)


def _by_name(model: PreTrainedModel) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters outside of divided experts, and their names in this model, by their names in transformers.

    The names differ inside of blocks whose experts are divided.
    """
    blocks, names = expert_blocks(model), arch_of(model.config).blocks
    parameters: dict[str, nn.Parameter] = {}
    paths: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        own: str | None = name
        if path is not None:
            origin = blocks[path].origin(name.removeprefix(f"{path}."), names)
            own = None if origin is None or origin.of_experts else f"{path}.{origin.name}"
        if own is not None:
            parameters[own], paths[own] = parameter, name
    return parameters, paths
