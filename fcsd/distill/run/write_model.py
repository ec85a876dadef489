"""The model directory of a checkpoint: ordinary Hugging Face, weights under their original names."""

from pathlib import Path

from transformers import PreTrainedModel

from fcsd.checkpoint import INDEX
from fcsd.checkpoint.side_files import side_files
from fcsd.checkpoint.staging import copy_small
from fcsd.launch.world import World
from fcsd.models.export_template import CODE_FILES


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
    written = {path.name for path in directory.iterdir()}
    copy_small(side_files(source, written | {INDEX}, code=CODE_FILES), directory)
