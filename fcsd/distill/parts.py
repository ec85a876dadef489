"""What trains, in a checkpoint, and the ordinary model that is made of it and of the weights beside which it trains.

A checkpoint of a run that freezes weights has the folder ``parts/`` in place of ``model/``: what trains, in
safetensors files under transformers' names, and a JSON file that says where the frozen weights are, and which model
they belong to: all of its bytes, its config with the wiring, its tokenizer and its templates.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fcsd.checkpoint import Checkpoint, open_checkpoint, whole_sha256
from fcsd.config import Recipe
from fcsd.disk import read_input, write_json
from fcsd.distill.inputs import student_source
from fcsd.distill.student import DTYPES, chosen_parts, load_student, train_parts, write_student
from fcsd.errors import BadInputError, CheckpointError
from fcsd.foreign_errors import reason_of
from fcsd.launch.world import World
from fcsd.models.adapters.trained import TrainedParts
from fcsd.parallel.tensor.layer import ranks_of
from fcsd.parallel.weights.saving import OwnPart, own_part
from fcsd.parallel.weights.trained import load_trained

_WEIGHTS, _SETTINGS = "parts.safetensors", "parts.json"
_VERSION = 1


def write_parts(part: OwnPart, base: Checkpoint, base_sha256: str, directory: Path, world: World) -> None:
    """Writes the folder of what trains; every rank calls this.

    Args:
        part: the result of ``trained_part``.
        base: the checkpoint of the frozen weights.
        base_sha256: its ``whole_sha256`` when it was loaded.
    """
    name = str(base.path.resolve()) if base.repo_id is None else f"{base.repo_id}@{base.revision}"

    def write() -> None:
        values = {name: value.cpu().contiguous() for name, value, _ in part.tensors()}
        if values:
            file = _WEIGHTS if world.rank == 0 else f"parts-{world.rank}.safetensors"
            save_file(values, directory / file, metadata={"format": "pt"})

    world.on_first(directory.mkdir)
    world.everywhere(write)
    facts = {"version": _VERSION, "base": name, "base_sha256": base_sha256}
    world.on_first(lambda: write_json(directory / _SETTINGS, facts))


def read_parts(folder: Path) -> dict[str, Tensor]:
    """What the ranks have written by ``write_parts``. The values are read from the files when they are used.

    Raises:
        CheckpointError: a file cannot be read.
    """
    values: dict[str, Tensor] = {}
    for file in sorted(folder.glob("parts*.safetensors")) or [folder / _WEIGHTS]:
        try:
            values |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {reason_of(error)}") from error
    return values


def require_base(base: Checkpoint, base_sha256: str, folder: Path) -> None:
    """Refuses frozen weights, or a model around them, that are not those beside which ``folder`` was trained.

    Raises:
        BadInputError: they are others.
    """
    if whole_sha256(base.layout) != base_sha256:
        what = "its weights, config, tokenizer or chat template are not those beside which"
        raise BadInputError(f"{base.path}: {what} {folder} was trained", "Restore them.")


def write_merged(parts: TrainedParts, folder: Path, source: Path, directory: Path, world: World) -> None:
    """Writes an ordinary model directory, with what a checkpoint has merged into the weights. Every rank calls
    this at the end of a run; the student is an ordinary model afterwards. A draft head is written alone.

    Args:
        folder: the folder ``parts/`` of the checkpoint, which was verified.
        source: the directory that the student was made from.
    """
    world.everywhere(lambda: load_trained(parts, read_parts(folder), str(folder), ranks_of(parts.model)))
    if (head := parts.head) is not None:
        return world.on_first(lambda: head.save(directory))
    write_student(own_part(parts.model, parts.merge()), source, directory, world, first=True)


def merge_checkpoint(recipe: Recipe, folder: Path, directory: Path) -> None:
    """Writes the ordinary model of a checkpoint with frozen weights, in one process. The whole model is in host memory.

    Args:
        folder: the folder ``parts/`` of the checkpoint, which was verified.

    Raises:
        BadInputError: the frozen weights are gone, or they changed since the run.
        CheckpointError: the folder is damaged.
    """
    try:
        facts = json.loads(read_input(folder / _SETTINGS))
        name, sha256 = facts["base"], facts["base_sha256"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / _SETTINGS}: cannot be read: {reason_of(error)}") from error
    try:
        base = open_checkpoint(name)
    except BadInputError as error:
        error.hint = f"What {folder.parent} has trained is merged into these weights; put them back."
        raise
    require_base(base, sha256, folder)
    parallel = recipe.parallel.model_copy(update={"ep_size": 1, "tp_size": 1, "zero_stage": 0})
    recipe = recipe.model_copy(update={"model": name, "parallel": parallel})
    chosen = chosen_parts(recipe, student_source(recipe))
    assert chosen is not None
    model = load_student(recipe, dtype=DTYPES[recipe.train.dtype], device=torch.device("cpu"))
    write_merged(train_parts(model, recipe, chosen), folder, base.path, directory, World(0, 1, torch.device("cpu")))
