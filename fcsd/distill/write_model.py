"""The model directory of a checkpoint: ordinary Hugging Face, weights under their original names."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from fcsd.convert import OTHER_WEIGHTS
from fcsd.launch import World


def write_model(model: PreTrainedModel, source: Path, directory: Path, degree: int, world: World) -> None:
    """Writes the trained weights, and all else as the student came.

    Every rank calls it: where ``degree`` processes divide the experts, each writes what it has.
    """
    world.on_first(directory.mkdir)
    if degree > 1:
        from fcsd.parallel.saving import save_model

        world.everywhere(lambda: save_model(model, directory, source))
    else:
        world.on_first(lambda: model.save_pretrained(directory))
    world.on_first(lambda: _copy_others(source, directory))


def _copy_others(source: Path, directory: Path) -> None:
    for path in source.iterdir():
        weights = path.name.endswith(OTHER_WEIGHTS)
        if path.is_file() and not weights and not (directory / path.name).exists():
            shutil.copy(path, directory)
