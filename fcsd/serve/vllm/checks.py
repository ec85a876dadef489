"""Refuses settings of vLLM with which a converted model would compute something else, or that nobody has tested.

vLLM asks when it has its settings together, before a process is started or a weight is read.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fcsd.checkpoint import read_object
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.rope import RopeBorder, rope_border
from fcsd.models.wiring_block import DESYNC, Wiring
from fcsd.serve.vllm.reduction import leaves_out, read_settings
from fcsd.serve.vllm.support import RIGHT_RESULTS, refusal

# Methods of speculation that read nothing inside of the model, or its last hidden state, in which no sum is missing.
_DRAFTS = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "mtp")


_LEAVE_OUT = "leave --model-impl, --hf-config-path, and architectures and fcsd in --hf-overrides, out"


def check(vllm_config: Any, model_type: str) -> None:
    """Refuse what does not go with a converted model, and let no sum travel in pieces that are not vLLM's own.

    Args:
        vllm_config: vLLM's ``VllmConfig``, whose ``hf_config`` has the ``fcsd`` block.

    Raises:
        ConfigError: a setting does not go with the model. The message names it and says what to do.
        BadInputError: the file of a table of sums is none for this.
    """
    model = vllm_config.model_config
    if _recorded(model) not in (None, model.hf_config.fcsd):
        raise ConfigError(f"converted model: its config.json has another wiring; {_LEAVE_OUT}")
    for problem in problems(vllm_config, model_type):
        raise ConfigError(f"converted model: {problem}")
    if _other_pieces(vllm_config):
        vllm_config.additional_config.setdefault("fcsd", {})["pieces"] = False


def refuse_other_architecture(vllm_config: Any, name: str) -> None:
    """Refuse a converted model of which vLLM is about to build another class than the rewired one.

    Args:
        vllm_config: vLLM's ``VllmConfig``. The plugin's config parser puts the ``fcsd`` block into ``hf_config``.
        name: the architecture that vLLM builds.

    The MTP layers of a converted model are a draft beside it, and stay as they are.

    Raises:
        ConfigError: the model is a converted one.
    """
    speculation = vllm_config.speculative_config
    if speculation is not None and vllm_config.model_config is speculation.draft_model_config:
        return
    model = vllm_config.model_config
    if getattr(model.hf_config, "fcsd", None) is not None or _recorded(model) is not None:
        raise ConfigError(
            f"converted model: vLLM would build it as {name}, which computes another function; {_LEAVE_OUT}"
        )


def _recorded(model_config: Any) -> Any:
    """The ``fcsd`` block in the directory of the weights, which no option can change; None without one, or on the hub.

    ``--hf-overrides`` and ``--hf-config-path`` can give vLLM another config than that of the weights.
    """
    file = Path(getattr(model_config, "model", "no directory")) / "config.json"
    with suppress(BadInputError):  # of another program's model, which vLLM may take
        return read_object(file).get("fcsd")
    return None


def problems(vllm_config: Any, model_type: str) -> Iterator[str]:
    """One line for each setting that does not go with the model; see ``check``."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    wiring = Wiring.from_block(config.fcsd)
    for field, value in ARCHS[model_type].vllm.assumes.items():
        if (found := getattr(config, field, value)) != value:
            yield f"config.json has {field} {found!r}, and vLLM's class computes with {value!r}; use fcsd's own engine"
    yield from _wiring_problems(wiring, parallel, ARCHS[model_type].vllm.whole)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    passes, speculation = vllm_config.compilation_config.pass_config, vllm_config.speculative_config
    border = rope_border(config)
    exchanges = parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe
    gated = ARCHS[model_type].blocks.gated
    asked = {
        "gates": bool(gated and getattr(config, gated, False) and vllm_config.quant_config),
        "float16": ARCHS[model_type].vllm.rescales_float16 and dtype == "float16",
        "sequence_parallel": parallel.use_sequence_parallel_moe,
        "data_parallel": exchanges and (not parallel.enable_expert_parallel or parallel.pipeline_parallel_size > 1),
        "all2all": exchanges and parallel.all2all_backend != "allgather_reducescatter",
        "dbo": parallel.use_ubatching,
        "eplb": parallel.enable_eplb,
        "context": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "enable_sp": getattr(passes, "enable_sp", False),  # vLLM 0.32 has no such pass
        "speculation": speculation is not None and speculation.method not in _DRAFTS,
        "lora": vllm_config.lora_config is not None,
        "pooling": vllm_config.model_config.runner_type == "pooling",
        "long_positions": _scales_short_texts(border, vllm_config.model_config.max_model_len),
        "dynamic_rope": border is not None and border.exact,
        "connectors": vllm_config.kv_transfer_config is not None,
        "fast_prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
    }
    yield from (refusal(name) for name, found in asked.items() if found)
    chosen = read_settings(vllm_config.additional_config, parallel.tensor_parallel_size)
    if _other_pieces(vllm_config) and vllm_config.additional_config.get("fcsd", {}).get("pieces"):
        yield (
            "pieces true in --additional-config: no sum can travel in the pieces of splitting_ops or "
            "use_inductor_graph_partition in --compilation-config; leave out pieces, or these two"
        )
    strict = bool(os.environ.get(RIGHT_RESULTS))
    if strict and leaves_out(chosen.reduce):
        wrong = f"reduce {chosen.reduce} gives wrong results"
        yield f"{wrong}, which fcsd serve and fcsd eval refuse; start vLLM for a bound"


def _other_pieces(vllm_config: Any) -> bool:
    """Whether an operator between two attentions could end a piece, or Inductor could choose what is in one."""
    compilation = vllm_config.compilation_config
    return compilation.splitting_ops is not None or compilation.use_inductor_graph_partition


def _scales_short_texts(border: RopeBorder | None, longest: int) -> bool:
    """Whether vLLM gives the positions of short texts the factors of long ones, as it does by ``max_model_len``."""
    return border is not None and not border.exact and border.beyond(longest)


def _wiring_problems(wiring: Wiring, parallel: Any, whole: bool) -> Iterator[str]:
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if wiring.name in DESYNC and tensor != wiring.tp_degree:
        yield f"{refusal('degree')}: --tensor-parallel-size {wiring.tp_degree}, not {tensor}"
    if pipeline > 1 and (whole or wiring.name in DESYNC or wiring.distance > 1):
        yield refusal("pipeline")
