"""The table of architectures under vLLM: how the children of a decoder layer are called in vLLM's own classes.

vLLM's model classes have the names of those of transformers, which ``fcsd.models.archs`` lists. Every decoder layer of
the table follows one convention in vLLM 0.24 to 0.28: it gets ``(hidden, residual)``, whose sum is the full stream, and
returns its MLP's output unadded beside the residual.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fcsd.models.archs import ARCHS

PREFIX = "Fcsd"


@dataclass(frozen=True)
class Row:
    """One architecture in vLLM.

    Attributes:
        decoder: the path, inside the model, of the module that holds ``layers``.
        attn: the attention of a layer. Its output projection is ``o_proj``.
        mlp: the MLP of a layer; a dense one has ``down_proj``, a mixture of experts has ``experts``.
        shared: the shared experts inside the MLP; None if there are none.
        hidden_first: whether layer and attention take ``(hidden, positions)`` instead of ``(positions, hidden)``.
        rescales_float16: whether vLLM's layer divides the stream by a constant in float16, which the plugin does not.
    """

    decoder: str = "model"
    attn: str = "self_attn"
    mlp: str = "mlp"
    shared: str | None = None
    hidden_first: bool = False
    rescales_float16: bool = False


_LLAMA4 = Row(mlp="feed_forward", shared="shared_expert")
_DEEPSEEK = Row(shared="shared_experts", rescales_float16=True)

ROWS: Mapping[str, Row] = {
    "llama": Row(),
    "qwen3": Row(),
    "qwen3_moe": Row(),
    "qwen2_moe": Row(shared="shared_expert"),
    "mixtral": Row(mlp="block_sparse_moe"),
    "olmoe": Row(),
    "glm4_moe": Row(shared="shared_experts"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": Row(attn="attn", hidden_first=True),
    "llama4_text": _LLAMA4,
    "llama4": Row(decoder="language_model.model", mlp="feed_forward", shared="shared_expert"),
}


def base_name(model_type: str) -> str:
    """The name of the class in vLLM's registry, for example ``LlamaForCausalLM``."""
    return ARCHS[model_type].classes["AutoModelForCausalLM"][0]


def names() -> dict[str, str]:
    """For each ``model_type``, the name under which its converted models are registered."""
    return {model_type: PREFIX + base_name(model_type) for model_type in ROWS}
