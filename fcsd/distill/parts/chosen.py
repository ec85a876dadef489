"""Freezes the student of a run but for what trains: adapters, named parts, or both."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fcsd.checkpoint import Checkpoint
from fcsd.config import Recipe
from fcsd.distill.student import meta_student
from fcsd.distill.teacher.twins import make_twins
from fcsd.extras import require_extra
from fcsd.models.adapters.lora import add_adapters
from fcsd.models.adapters.nf4 import require_nf4
from fcsd.models.adapters.targets import Chosen, choose, choose_parts
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.partitions import is_partitioned


def chosen_parts(recipe: Recipe, source: Checkpoint) -> Chosen | None:
    """What trains beside frozen weights, by the names in the recipe; None if all weights train. No weight is read.

    Args:
        source: the checkpoint that the student is made from.

    Raises:
        ConfigError: ``peft`` or bitsandbytes is not installed, the recipe names a part that the model does not have, or
            the model cannot be trained beside NF4 weights.
    """
    if recipe.frozen_beside is None:
        return None
    model, parts = meta_student(recipe, source), recipe.optim.train
    if (adapter := recipe.train.adapter) is None:
        return choose_parts(model, parts)
    require_extra("train", "train.adapter", "peft")
    chosen = choose(model, adapter.targets, parts, adapter.layers)
    if adapter.base == "nf4":
        require_extra("nf4", "train.adapter.base nf4", "bitsandbytes")
        require_nf4(model, chosen.trained, recipe.model, quantised=source.config.quantization is not None)
    return chosen


def train_parts(model: PreTrainedModel, recipe: Recipe, chosen: Chosen) -> TrainedParts:
    """Freezes everything but ``chosen.trained`` in a student that has just been loaded, and puts adapters into it.

    The values of the adapters are the same on every rank and at any ``parallel.ep_size``.
    """
    parameters, paths = _by_name(model)
    trained = {own: p for name in chosen.trained for own, p in parameters[name].items()}
    asked = {name: p.requires_grad for name, p in trained.items()}  # with sharded layers one rank trains some biases
    model.requires_grad_(False)
    for name, parameter in trained.items():
        parameter.requires_grad_(asked[name])
    originals, twins = {}, ()
    if recipe.objective.needs_teacher and any(map(is_partitioned, trained.values())):
        twins = make_twins(model, trained.values())
    elif recipe.objective.needs_teacher:
        originals = {name: p.detach().clone() for name, p in trained.items()}
    places = {name: paths[f"{name}.weight"].removesuffix(".weight") for name in chosen.adapted}
    layers: dict[str, Any] = {}
    if (adapter := recipe.train.adapter) is not None:
        layers = add_adapters(model, places, adapter.rank, adapter.factor * adapter.rank, recipe.seed)
    return TrainedParts(model, layers, trained, originals, twins)


def _by_name(model: PreTrainedModel) -> tuple[dict[str, dict[str, nn.Parameter]], dict[str, str]]:
    """The parameters that stand for each of transformers', by their names in ``TrainedParts``, and names in this model.

    Names differ inside of blocks whose experts are divided, where several parameters stand for one of all experts. The
    names in this model do not have those of divided experts.
    """
    blocks, names = expert_blocks(model), arch_of(model.config).blocks
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    paths: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        if path is None:
            parameters[name], paths[name] = {name: parameter}, name
            continue
        origin = blocks[path].origin(name.removeprefix(f"{path}."), names)
        if origin is None:
            continue  # the first part of the original tensor stands for all parts
        own = f"{path}.{origin.name}"
        if origin.of_experts:
            parameters[own] = {f"{path}.{part}": model.get_parameter(f"{path}.{part}") for part in origin.parts}
        else:
            parameters[own], paths[own] = {own: parameter}, name
    return parameters, paths
