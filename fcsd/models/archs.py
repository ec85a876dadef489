"""The table of supported architectures: one row of data for each ``model_type``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .wiring_block import DESYNC, READS, Blocks


@dataclass(frozen=True)
class Arch:
    """How one ``model_type`` of transformers is built and taken apart.

    Args:
        model_type: the type as ``config.json`` names it.
        config: the name of the transformers config class.
        classes: Auto class -> (transformers model class, path inside it of the module that holds ``layers``).
        blocks: the names of a decoder layer's children.
        text_config: for multimodal types, the name of the sub-config that describes the language model.
        dense: whether no layer has experts. Only a dense architecture can take a Desync wiring.
        autoep: the keys for DeepSpeed AutoEP, which without them looks an architecture up by its ``model_type``; None
            for types that cannot be expert-parallel.
        no_ep: why the type cannot be expert-parallel although it has experts.
        packs: whether transformers' code keeps attention inside documents where position ids restart.
        norm_epsilon: the name of the attribute of its RMSNorms that holds epsilon.
        rotates_halves: whether rotary embeddings rotate the first half of a head's dimensions against the second, by
            angles that are given twice. Others rotate pairs of neighbours, or give every angle once.
    """

    model_type: str
    config: str
    classes: Mapping[str, tuple[str, str]]
    blocks: Blocks = field(default_factory=Blocks)
    text_config: str | None = None
    dense: bool = False
    autoep: Mapping[str, Any] | None = None
    no_ep: str | None = None
    packs: bool = True
    norm_epsilon: str = "variance_epsilon"
    rotates_halves: bool = False

    @property
    def wirings(self) -> tuple[str, ...]:
        """The names of the wirings that this architecture can have."""
        return (*READS, *DESYNC) if self.dense else tuple(READS)


def _row(model_type: str, stem: str, **fields: Any) -> Arch:
    classes = {"AutoModel": (f"{stem}Model", ""), "AutoModelForCausalLM": (f"{stem}ForCausalLM", "model")}
    return Arch(model_type, **{"config": f"{stem}Config", "classes": classes, **fields})


# Llama-4's router multiplies the experts' inputs, and its experts are stored [experts, in, out].
_LLAMA4_BLOCKS = Blocks(mlp="feed_forward", router="router", shared="shared_expert", flattens=True, prescaled=True)
_LLAMA4_AUTOEP = {
    "router_pattern": "router",
    "expert_pattern": "experts",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "expert_w3": None,
    "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok",
    "score_func": "sigmoid",
    "score_apply": "pre",
    "route_norm": False,
    "has_shared_experts": True,
    "shared_experts_pattern": "shared_expert",
}
_LLAMA4_VISION = ("Llama4ForConditionalGeneration", "language_model.model")
_SHARED_EXPERTS = Blocks(shared="shared_experts")

_ROWS = (
    _row("llama", "Llama", dense=True, rotates_halves=True),
    _row("qwen3", "Qwen3", dense=True, rotates_halves=True),
    _row("qwen3_moe", "Qwen3Moe", autoep={"preset_model": "qwen3_moe"}, rotates_halves=True),
    _row(
        "qwen2_moe",
        "Qwen2Moe",
        blocks=Blocks(shared="shared_expert", shared_gate="shared_expert_gate", flattens=True),
        autoep={"preset_model": "qwen3_moe"},
        rotates_halves=True,
    ),
    _row("mixtral", "Mixtral", autoep={"preset_model": "mixtral"}, rotates_halves=True),
    _row("olmoe", "Olmoe", autoep={"preset_model": "qwen3_moe"}, rotates_halves=True),
    _row("glm4_moe", "Glm4Moe", blocks=_SHARED_EXPERTS, autoep={"preset_model": "deepseek_v3"}, rotates_halves=True),
    _row("deepseek_v2", "DeepseekV2", blocks=_SHARED_EXPERTS, autoep={"preset_model": "deepseek_v2"}),
    _row("deepseek_v3", "DeepseekV3", blocks=_SHARED_EXPERTS, autoep={"preset_model": "deepseek_v3"}),
    _row(
        "gpt_oss",
        "GptOss",
        blocks=Blocks(router="router"),
        no_ep="DeepSpeed AutoEP has no expert biases, which gpt_oss needs",
        packs=False,
    ),
    _row(
        "llama4_text",
        "Llama4Text",
        classes={
            "AutoModel": ("Llama4TextModel", ""),
            "AutoModelForCausalLM": ("Llama4ForCausalLM", "model"),
        },
        blocks=_LLAMA4_BLOCKS,
        autoep={"moe_layer_pattern": r"model\.layers\.\d+\.feed_forward", **_LLAMA4_AUTOEP},
        norm_epsilon="eps",
    ),
    _row(
        "llama4",
        "Llama4",
        # One class serves text and images, so that no tensor is lost when the model is used for text only.
        classes={auto: _LLAMA4_VISION for auto in ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")},
        blocks=_LLAMA4_BLOCKS,
        text_config="text_config",
        autoep={"moe_layer_pattern": r"language_model\.model\.layers\.\d+\.feed_forward", **_LLAMA4_AUTOEP},
        norm_epsilon="eps",
    ),
)

ARCHS: Mapping[str, Arch] = {row.model_type: row for row in _ROWS}
