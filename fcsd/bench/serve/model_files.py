"""A directory that vLLM loads with random weights: the config.json of the original or of a wiring."""

import json
from pathlib import Path

from transformers import PretrainedConfig

from fcsd.bench.shapes import SHAPES
from fcsd.models.build import arch_of
from fcsd.models.config_keys import PREFIX
from fcsd.models.wiring_block import Wiring
from fcsd.serve.vllm.config import base_config


def write_directory(model: str, config: PretrainedConfig, wiring: Wiring, path: Path, positions: int) -> Path:
    """Make a directory that vLLM can load.

    Args:
        model: a name in ``fcsd.bench.shapes``, or a directory.
        wiring: the wiring of the result; the original if it has no layers.
        positions: the tokens that the model takes at least, which may be more than its own number.

    Returns:
        ``path``.
    """
    path.mkdir()
    source = path if model in SHAPES else Path(model)
    if model in SHAPES:
        config.save_pretrained(path)
    fields = json.loads((source / "config.json").read_bytes())
    fields, arch = base_config(fields, source) or fields, arch_of(config)
    fields["architectures"] = [arch.causal_lm]
    if wiring.layers:
        fields |= {"model_type": PREFIX + arch.model_type, "architectures": [arch.wired_causal_lm]}
        fields["fcsd"] = wiring.to_block()
    text = fields.get("text_config", fields)
    text["max_position_embeddings"] = max(text.get("max_position_embeddings", 0), positions)
    (path / "config.json").write_text(json.dumps(fields))
    return path
