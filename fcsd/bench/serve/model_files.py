"""A directory that vLLM loads: the config.json of the original or of a wiring, and links to a checkpoint's files."""

import json
from pathlib import Path

from transformers import PretrainedConfig

from fcsd.bench.shapes import SHAPES
from fcsd.models.build import arch_of
from fcsd.models.config_keys import PREFIX
from fcsd.models.wiring_block import Wiring
from fcsd.serve.vllm.config import base_config


def write_directory(
    model: str, config: PretrainedConfig, wiring: Wiring, path: Path, *, weights: bool, positions: int = 0
) -> Path:
    """Make a directory that vLLM can load.

    Args:
        model: a name in ``fcsd.bench.shapes``, or a directory.
        config: the config of the model.
        wiring: the wiring of the result; the original if it has no layers.
        path: the directory to make.
        weights: whether the files of ``model`` are linked; otherwise config.json is all there is.
        positions: the tokens that the model takes at least. More than its own number is for random weights alone.

    Returns:
        ``path``.
    """
    path.mkdir()
    source = path if model in SHAPES else Path(model)
    if model in SHAPES:
        config.save_pretrained(path)
    elif weights:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json":
                (path / file.name).symlink_to(file.resolve())
    fields = json.loads((source / "config.json").read_text())
    converted = base_config(fields, source)
    fields, arch = fields if converted is None else converted[0], arch_of(config)
    fields["architectures"] = [arch.causal_lm]
    if wiring.layers:
        fields |= {"model_type": PREFIX + arch.model_type, "architectures": [arch.wired_causal_lm]}
        fields["fcsd"] = wiring.to_block()
    text = fields.get("text_config", fields)
    text["max_position_embeddings"] = max(text.get("max_position_embeddings", 0), positions)
    (path / "config.json").write_text(json.dumps(fields))
    return path
