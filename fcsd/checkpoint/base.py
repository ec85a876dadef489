"""The whole gate in one call: a base model that may be rewired, with everything known about it."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from fcsd.checkpoint.config_json import CheckpointConfig, read_config
from fcsd.checkpoint.files import contained, open_regular, shown
from fcsd.checkpoint.layout import INDEX, Layout, read_layout
from fcsd.checkpoint.rewired import describe
from fcsd.checkpoint.source import OTHER_FORMATS, Source, resolve
from fcsd.checkpoint.verify import Comparison, verify_tensors
from fcsd.errors import BadInputError


@dataclass(frozen=True)
class Base:
    """A checked base model."""

    source: Source
    config: CheckpointConfig
    layout: Layout
    comparison: Comparison


def open_base(model: str, *, trust_remote_code: bool = False, allow_unexpected: bool = False) -> Base:
    """Find a base model and check everything that can be checked without reading a weight.

    Args:
        model: a directory or ``org/name[@revision]``, which is downloaded.
        trust_remote_code: accept an ``auto_map``; no code of the checkpoint is run all the same.
        allow_unexpected: accept tensors that the base class does not know.

    Raises:
        BadInputError: anything is wrong with it, or it is rewired already.
    """
    source = resolve(model)
    config = read_config(source.path, trust_remote_code=trust_remote_code)
    if config.rewired is not None:
        origin = config.rewired.get("base_model")
        raise BadInputError(
            f"{model}: is already rewired: {describe(config.rewired)}",
            f"Pass the original instead{f': {shown(str(origin))}' if origin else ''}.",
        )
    layout = read_layout(source.path, allow_unexpected=allow_unexpected)
    return Base(source, config, layout, verify_tensors(layout, config, allow_unexpected=allow_unexpected))


def companions(path: Path) -> dict[str, Path]:
    """The files beside weights and config.json (tokenizer, licence, ...): name -> the regular file behind it.

    Raises:
        BadInputError: one is a link that leaves the checkpoint, or not a regular file.
    """
    found = {}
    for entry in sorted(path.iterdir()):
        ours = entry.name in ("config.json", INDEX) or entry.suffix == ".safetensors"
        if entry.is_dir() or ours or any(fnmatch(entry.name, pattern) for pattern in OTHER_FORMATS):
            continue
        found[entry.name] = contained(path, entry.name)
        open_regular(found[entry.name]).close()
    return found
