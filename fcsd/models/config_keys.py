"""Names that several packages need: keys of config.json, and what the installed transformers calls its arguments.

Without torch and transformers, so that each package can import this file.
"""

from collections.abc import Mapping
from typing import Any

from .arch import transformers_version

# The model_type of a converted checkpoint is this prefix followed by that of its base.
PREFIX = "fcsd_"

# The number of routed experts; a config has one of these keys, or two of them that are equal.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# The number of experts that a token is routed to, and of shared experts.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def expert_count(fields: Mapping[str, Any]) -> int:
    """The number of routed experts of a MoE layer, by the fields of a language model's config; 0 if it names none."""
    return first_count(fields, EXPERT_COUNTS)


def first_count(fields: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of these numbers that a config has; 0 if it has none. Of a list with a number a layer, the highest."""
    found = next((fields[key] for key in keys if fields.get(key)), 0)
    return max(found) if isinstance(found, list) else found


# transformers reads the name of the weights file from this key. If the value is not a file name, transformers refuses
# the directory with a message that contains the value. A converted config.json has REFUSAL as the value, so that the
# base class of transformers refuses the directory instead of computing a different function with its weights. The
# config classes of fcsd ignore the key.
WEIGHTS_FILE = "transformers_weights"
REFUSAL = "this model is rewired; load it by an Auto class, with trust_remote_code=True or after `import fcsd`"

# transformers applies the adapter that this file describes to the model beside which it lies. It would be a part of
# what fcsd computes and not of what fcsd writes.
ADAPTER = "adapter_config.json"
BOTH = f"holds a whole model and an adapter ({ADAPTER}), which transformers would apply to it"
DIVIDE = (
    f"Move {ADAPTER} and adapter_model.* to a directory of their own, or merge them first "
    "(peft: merge_and_unload) and pass the result."
)

# What to do about a checkpoint that holds, beside a tensor, another one that the config ties to it.
UNTIE = (
    'If the separate tensor is the right one, set "tie_word_embeddings": false in config.json; '
    "otherwise leave it out of the files."
)


def cache_keyword() -> str:
    """The name under which transformers' models, layers and attentions take the keys and values of earlier tokens.

    Since 5.24 a decorator of theirs still takes the older name, with a warning, and passes on the new one alone.
    """
    return "cache" if transformers_version() >= (5, 24) else "past_key_values"
