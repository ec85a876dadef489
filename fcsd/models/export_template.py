"""Writes the code of a converted directory, with which ``trust_remote_code`` loads it where fcsd is not installed.

The code consists of five files in one folder. The files ``VERBATIM`` are copied from here unchanged. Two files are
rendered for the architecture: they define, in plain class statements, the classes that ``build.py`` makes at run
time. transformers copies only files of the same folder, and every other import must be an installed package. The code
therefore imports torch and transformers only.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from typing import Any

from .arch import CONFIGURATION, MODELING, Arch
from .config_keys import PREFIX, REFUSAL, WEIGHTS_FILE
from .wiring_block import Blocks

VERBATIM = ("wiring.py", "wiring_block.py", "desync.py")
CODE_FILES = frozenset((f"{CONFIGURATION}.py", f"{MODELING}.py", *VERBATIM))
# The versions of transformers with which the rendered classes are tested: from the first up to, but not including, the
# second. pyproject.toml has the same range.
TRANSFORMERS = ((5, 17), (6, 0))

_CONFIGURATION = '''"""Config of a rewired {model_type} model, written by fcsd; transformers loads it first."""

import transformers

if not {oldest} <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) < {too_new}:
    raise ImportError(
        "this rewired model needs transformers >={oldest_text},<{too_new_text}, not " + transformers.__version__
    )

from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

# AutoTokenizer goes by model type where it does not trust tokenizer_config.json.
TOKENIZER_MAPPING_NAMES["{prefix}{model_type}"] = TOKENIZER_MAPPING_NAMES.get("{model_type}")


class Fcsd{config}(transformers.{config}):
    """{config} of a rewired model; ``fcsd`` says which layers are rewired, and how."""

    model_type = "{prefix}{model_type}"
    fcsd: dict | None = None
    # config.json names no file here, so that transformers' own class refuses the model; this class finds its weights.
    {weights_file} = property(lambda self: None, lambda self, value: None)

    def to_dict(self):
        """What is written to config.json, by whatever tool saves the model."""
        return {{**super().to_dict(), "{weights_file}": "{refusal}"}}
'''

_MODELING = '''"""Rewired {model_type}, written by fcsd: transformers' own classes, taken apart by wiring.py."""

from transformers import {imports}
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from .configuration_fcsd import Fcsd{config}
from .wiring import Blocks, WiredModel

# How tensors lie on disk. Without it transformers would leave experts at random, and only warn.
_mappings = {mappings}
for _theirs, _own in _mappings.items():
    _mapping = get_checkpoint_conversion_mapping(_theirs)
    if _mapping is not None:
        register_checkpoint_conversion_mapping(_own, _mapping, overwrite=True)
'''

_CLASS = '''

class Fcsd{name}(WiredModel, {name}):
    """{name}, wired as its config's ``fcsd`` block says."""

    config_class = Fcsd{config}
    fcsd_decoder = "{decoder}"
    fcsd_blocks = {blocks}
'''


def converted_files(raw: Mapping[str, Any], arch: Arch, block: Mapping[str, Any]) -> dict[str, str]:
    """The text files that fcsd writes into a converted directory: config.json and the code.

    Args:
        raw: the config.json of the base, or of a converted model whose code is written again.
        block: see ``Wiring.to_block``.

    Returns:
        File name -> text.
    """
    own = {
        "model_type": PREFIX + arch.model_type,
        "architectures": [arch.wired_causal_lm],
        "auto_map": arch.auto_map,
        WEIGHTS_FILE: REFUSAL,
        "fcsd": block,
    }
    return {"config.json": json.dumps({**raw, **own}, indent=2) + "\n", **render(arch)}


def render(arch: Arch) -> Mapping[str, str]:
    """The code in a converted directory of this architecture: a map of file names to texts."""
    oldest, too_new = TRANSFORMERS
    decoders = dict(sorted(arch.classes.values()))
    common = {"model_type": arch.model_type, "prefix": PREFIX, "config": arch.config, "weights_file": WEIGHTS_FILE}
    common["refusal"] = REFUSAL
    configuration = _CONFIGURATION.format(
        **common,
        oldest=oldest,
        too_new=too_new,
        oldest_text=".".join(map(str, oldest)),
        too_new_text=too_new[0],
    )
    mappings = json.dumps({arch.model_type: PREFIX + arch.model_type, **{name: f"Fcsd{name}" for name in decoders}})
    modeling = _MODELING.format(**common, imports=", ".join(decoders), mappings=mappings)
    for name, decoder in decoders.items():
        modeling += _CLASS.format(**common, name=name, decoder=decoder, blocks=_source(arch.blocks))
    shipped = {name: files("fcsd.models").joinpath(name).read_text("utf-8") for name in VERBATIM}
    return {f"{CONFIGURATION}.py": configuration, f"{MODELING}.py": modeling, **shipped}


def _source(blocks: Blocks) -> str:
    default = Blocks()
    chosen = {f.name: getattr(blocks, f.name) for f in fields(Blocks)}
    given = [f"{name}={value!r}" for name, value in chosen.items() if value != getattr(default, name)]
    return f"Blocks({', '.join(given)})".replace("'", '"')
