"""Attention of a decoding step without repeated keys: query heads that share keys are treated as several queries.

transformers 5.17 repeats keys and values for every query head where there is a mask, as in every step that decodes in
slots. For Llama-3 70B it thereby writes and reads eight times the keys and values that the cache holds. A single query
token needs no repetition: the query heads of one key-value head take the place of queries, ``[batch, key-value heads,
query heads for each, head size]``. transformers 5.23 does the same by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME, ORDINARY = "fcsd_grouped", "sdpa"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers, which returns what its ``sdpa`` returns.

    Args:
        module: the attention of a layer.
        query: ``[batch, heads, queries, head size]``.
        key: ``[batch, key-value heads, keys, head size]``, and ``value`` likewise.
        attention_mask: additive, ``[batch, 1, queries, keys]``; None for no mask.
        options: what else transformers passes on, ``scaling`` among it.

    Returns:
        ``[batch, queries, heads, head size]``, and None for the weights.
    """
    batch, heads, queries, size = query.shape
    shared = heads // key.shape[1]
    if queries != 1 or shared == 1 or options.get("position_bias") is not None:
        return ALL_ATTENTION_FUNCTIONS[ORDINARY](module, query, key, value, attention_mask, **options)
    query = query.reshape(batch, key.shape[1], shared, size)
    scaling = options.get("scaling")
    found = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, a model whose attention is ``sdpa`` uses ``attend``; every other model stays as it is."""
    config: Any = model.config.get_text_config()
    if config._attn_implementation != ORDINARY:
        yield
        return
    AttentionInterface.register(NAME, attend)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = ORDINARY
