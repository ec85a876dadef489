"""The student before its first step: a checkpoint's weights or random ones, in its own wiring or the recipe's."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import INDEX, Location, read_config, read_layout, resolve
from fcsd.checkpoint.location import origin
from fcsd.checkpoint.rewired import refuse_rewired
from fcsd.checkpoint.side_files import side_files
from fcsd.checkpoint.staging import copy_small
from fcsd.checkpoint.wiring_options import choose_wiring
from fcsd.config import Recipe
from fcsd.distill import expert_parallel
from fcsd.errors import BadInputError
from fcsd.launch.world import World
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, converted_config, register
from fcsd.models.export_template import CODE_FILES


def student_source(recipe: Recipe) -> Location:
    """Where the student comes from. With random weights only its config and tokenizer are fetched.

    Raises:
        BadInputError: the path does not exist or is not a checkpoint.
    """
    return resolve(recipe.model, weights=recipe.init.weights == "loaded")


def student_config(recipe: Recipe, source: Location) -> PretrainedConfig:
    """The student's config, rewired if the recipe says so.

    Raises:
        BadInputError: the architecture is not supported, or it is to be rewired and is already.
        ConfigError: the wiring does not fit it.
    """
    init = recipe.init
    register()
    checked = read_config(source.path)
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    arch_of(config)
    if init.weights == "random" and checked.quantization is not None:
        raise BadInputError(f"{source.path}: random weights are not quantised", "Remove quantization_config.")
    if init.wiring is None:
        return config
    refuse_rewired(source.path, checked.rewired)
    wiring = choose_wiring(
        checked,
        ARCHS[checked.model_type],
        init.wiring,
        init.layers,
        variant=init.variant,
        border=init.border,
        distance=init.distance,
        tp_degree=init.tp_degree,
        reduce=init.reduce,
    )
    made_from = origin(source, read_layout(source.path)) if init.weights == "loaded" else {}
    return converted_config(config, wiring.to_block(**made_from))


def load_student(recipe: Recipe, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The student in eval mode. Every rank has the same weights, except for the experts that are divided over ranks.

    Random weights follow the architecture's own rules (``initializer_range`` of the config) and the recipe's seed;
    each module and each expert draws on its own, so they are the same at any ``parallel.ep_size``.

    Raises:
        BadInputError, ConfigError: see ``student_config``; weights that do not match it.
    """
    source = student_source(recipe)
    config = student_config(recipe, source)
    ep_size = recipe.parallel.ep_size
    if recipe.init.weights == "loaded":
        return expert_parallel.load(source.path, ep_size, dtype=dtype, device=device, config=config)
    return expert_parallel.randomise(config, ep_size, dtype=dtype, device=device, seed=recipe.seed)


def meta_student(recipe: Recipe, source: Location) -> PreTrainedModel:
    """The student on the meta device: all shapes, no memory."""
    config = student_config(recipe, source)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def write_student(model: PreTrainedModel, source: Path, directory: Path, world: World, *, random: bool = False) -> None:
    """The model directory of a checkpoint: ordinary Hugging Face, weights under their original names.

    Every rank calls it and writes its part of the trained weights; all other files are those of ``source``.

    Args:
        source: the directory that the student was made from.
        random: it gave a config and a tokenizer; it may have no weights.
    """
    from fcsd.parallel.weights.saving import save_model

    world.on_first(directory.mkdir)
    world.everywhere(lambda: save_model(model, directory, None if random else source))
    world.on_first(lambda: _copy_others(source, directory))


def _copy_others(source: Path, directory: Path) -> None:
    written = {path.name for path in directory.iterdir()}
    copy_small(side_files(source, written | {INDEX}, code=CODE_FILES), directory)
