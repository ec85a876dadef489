"""The model directory of a checkpoint: ordinary Hugging Face, weights under their original names."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from fcsd.convert import OTHER_WEIGHTS
from fcsd.launch.world import World


def write_model(model: PreTrainedModel, source: Path, directory: Path, world: World, *, random: bool = False) -> None:
    """Writes the trained weights, and all else as the student came; every rank calls it and writes its part.

    Args:
        source: what the student was made from.
        random: ``source`` gave a config and a tokenizer; it may have no weights.
    """
    from fcsd.parallel.weights.saving import save_model

    world.on_first(directory.mkdir)
    world.everywhere(lambda: save_model(model, directory, None if random else source))
    world.on_first(lambda: _copy_others(source, directory))


def _copy_others(source: Path, directory: Path) -> None:
    for path in source.iterdir():
        weights = path.name.endswith(OTHER_WEIGHTS)
        if path.is_file() and not weights and not (directory / path.name).exists():
            shutil.copy(path, directory)
