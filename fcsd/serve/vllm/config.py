"""Reads the config.json of a converted model under vLLM: as the config of its base, with the ``fcsd`` block beside it.

vLLM decides by ``model_type`` whether attention is latent, how mxfp4 is read, how chats are parsed. A converted model
therefore reaches vLLM with the type of its base. Its architecture is its own, so that vLLM loads the rewired class.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.config_keys import PREFIX, WEIGHTS_FILE
from fcsd.models.wiring_block import Wiring

_OWN_KEYS = ("fcsd", "auto_map", WEIGHTS_FILE)


def base_config(raw: dict[str, Any], where: str | Path) -> dict[str, Any] | None:
    """The config.json of a converted model's base; None if the model is not a converted one.

    Args:
        where: the directory or repository, for messages.

    Raises:
        BadInputError: type and block do not belong together, the architecture has no row, or the block is not one that
            this version reads.
    """
    declared, block = str(raw.get("model_type")), raw.get("fcsd")
    if block is None and not declared.startswith(PREFIX):
        return None
    model_type = declared.removeprefix(PREFIX)
    if not isinstance(block, dict) or not declared.startswith(PREFIX):
        raise BadInputError(f"{where}: model_type {declared!r} and its fcsd block do not belong together")
    text = model_type  # the type of the language model, which is another one in a type that takes several
    if model_type in ARCHS and ARCHS[model_type].texts:
        text = str(raw.get("text_config", {}).get("model_type"))
        if text not in ARCHS and text in ARCHS[model_type].texts:
            text = model_type  # another name of a type that has a row
    if missing := {model_type, text} - ARCHS.keys():
        raise BadInputError(f"{where}: the vLLM plugin does not have the architecture {missing.pop()!r}")
    if (reason := ARCHS[model_type].no_vllm or ARCHS[text].no_vllm) is not None:
        inside = "" if text == model_type else f" with {text}"
        what = f"the vLLM plugin cannot serve {model_type}{inside}"
        raise BadInputError(f"{where}: {what}: {reason}", "Use fcsd's own engine.")
    try:
        Wiring.from_block(block)
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(f"{where}: {error}") from None
    fields = {key: value for key, value in raw.items() if key not in _OWN_KEYS}
    return {**fields, "model_type": model_type, "architectures": [ARCHS[model_type].vllm_causal_lm]}


def parser_for(stock: type[Any]) -> type[Any]:
    """vLLM's parser of transformers' configs, which reads converted models too.

    Args:
        stock: the parser to derive from. Its ``parse(model, trust_remote_code, revision, code_revision, **options)``
            returns the content of config.json and the config.
    """

    class FcsdConfigParser(stock):
        def parse(
            self,
            model: str | Path,
            trust_remote_code: bool,
            revision: str | None = None,
            code_revision: str | None = None,
            **options: Any,
        ) -> tuple[dict[str, Any], PretrainedConfig]:
            raw, _ = PretrainedConfig.get_config_dict(model, revision=revision)
            fields = base_config(raw, model)
            if fields is None:
                return super().parse(model, trust_remote_code, revision, code_revision, **options)
            wired = ARCHS[fields["model_type"]].wired_causal_lm
            with tempfile.TemporaryDirectory(prefix="fcsd-config-") as folder:
                Path(folder, "config.json").write_text(json.dumps(fields))
                fields, config = super().parse(folder, False, **options)
            config.name_or_path = str(model)
            config.architectures = [wired]
            config.fcsd = raw["fcsd"]
            return fields, config

    return FcsdConfigParser
