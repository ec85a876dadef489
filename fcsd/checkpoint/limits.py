"""Checks the numbers in config.json for bounds and contradictions before any class is built from them.

transformers accepts most of what is refused here: zero experts, more experts per token than experts, a negative number
of layers.
"""

from collections.abc import Callable
from operator import gt, ne
from pathlib import Path
from typing import Any

from fcsd.checkpoint.files import quoted
from fcsd.errors import BadInputError
from fcsd.models.config_keys import EXPERT_COUNTS, EXPERTS_PER_TOKEN

# key -> (least, most). The upper bounds are above the values of every known model, and small enough that a model with
# such values can be checked quickly.
_SIZES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "interleave_moe_layer_step", "decoder_sparse_step"), (1, 10_000)),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), (0, 10_000)
    ),
    **dict.fromkeys(EXPERT_COUNTS, (1, 100_000)),
    **dict.fromkeys((*EXPERTS_PER_TOKEN, "n_group", "topk_group"), (1, 100_000)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "intermediate_size_mlp"), (1, 1 << 22)),
    "moe_intermediate_size": (1, 1 << 22),
    "shared_expert_intermediate_size": (0, 1 << 22),  # 0 for none, as with n_shared_experts
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), (1, 1 << 22)),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), (1, 1 << 16)),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), (1, 1 << 30)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), (0, 1 << 40)),
}


# Sizes of which a config may have one a layer, as Hunyuan's have.
_ONE_A_LAYER = ("moe_intermediate_size", "moe_topk")


def _indivisible(divisor: int, number: int) -> bool:
    return number % divisor != 0


# (key, other key, the relation of their values that is an error, the same relation in words)
_CONTRADICTIONS: list[tuple[str, str, Callable[[int, int], bool], str]] = [
    *[(chosen, key, gt, "exceeds") for chosen in ("num_experts_per_tok", "moe_k") for key in EXPERT_COUNTS],
    ("num_experts", "num_local_experts", ne, "is not"),  # both keys name the same number
    ("topk_group", "n_group", gt, "exceeds"),
    ("n_group", "n_routed_experts", _indivisible, "does not divide"),
    ("first_k_dense_replace", "num_hidden_layers", gt, "exceeds"),
    ("num_key_value_heads", "num_attention_heads", _indivisible, "does not divide"),
]


def check_numbers(config: dict[str, Any], where: str | Path) -> None:
    """Check the numbers of a config or of a config inside it.

    Raises:
        BadInputError: a size is not a whole number within its bounds, or two of them contradict each other.
    """
    for key, (least, most) in _SIZES.items():
        given = config.get(key)
        for value in given if key in _ONE_A_LAYER and isinstance(given, list) else [given]:
            if value is None or (type(value) is int and least <= value <= most):
                continue
            shown = quoted(value) if isinstance(value, str) else str(value)[:40]
            raise BadInputError(f"{where}: {key} is {shown}, not a whole number from {least} to {most}")
    if config.get("num_experts_per_tok", 1) is None:  # transformers accepts None and fails at the first token
        raise BadInputError(f"{where}: num_experts_per_tok is null")
    for key, other, wrong, words in _CONTRADICTIONS:
        a, b = config.get(key), config.get(other)
        if a is not None and b is not None and wrong(a, b):
            raise BadInputError(f"{where}: {key}, {a}, {words} {other}, {b}")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        lists = [rope.get(name) for name in ("short_factor", "long_factor")] if isinstance(rope, dict) else []
        if len({len(factors) for factors in lists if isinstance(factors, list)}) > 1:
            raise BadInputError(f"{where}: {key} has a short_factor and a long_factor of different lengths")
    for key in ("mlp_only_layers", "moe_layers"):
        layers = config.get(key)
        last = (config.get("num_hidden_layers") or _SIZES["num_hidden_layers"][1]) - 1
        if layers is None:
            continue
        if not isinstance(layers, list) or not all(type(i) is int and 0 <= i <= last for i in layers):
            raise BadInputError(f"{where}: {key} is not a list of layers from 0 to {last}")
