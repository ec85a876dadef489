"""Attention of a decoding step: without repeated keys, or by a kernel that reads only the keys of each slot.

transformers 5.17 repeats keys and values for every query head where there is a mask, as in every step that decodes in
slots. For Llama-3 70B it thereby writes and reads eight times the keys and values that the cache holds. A single query
token needs no repetition: the query heads of one key-value head take the place of queries, ``[batch, key-value heads,
query heads for each, head size]``. transformers 5.23 does the same by itself. torch's kernel for this reads all keys up
to the width of the step, and one program reads all keys of a slot and key-value head.

``split`` stands for the kernel of ``fcsd.kernels.decode.attention``, which divides the keys of a slot between programs,
and for ``latent_steps`` in models with latent attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fcsd.engine.latent_steps import KeptLatents, attend_to_latents, keep_latents
from fcsd.models.build import decoder_layers

GROUPED, SPLIT = "grouped", "split"
ORDINARY = "sdpa"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers, which returns what its ``sdpa`` returns.

    Args:
        query: ``[batch, heads, queries, head size]``.
        key: ``[batch, key-value heads, keys, head size]``, and ``value`` likewise.
        attention_mask: additive, ``[batch, 1, queries, keys]``; None for no mask.

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


def attend_split(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, None]:
    """The attention function of ``split``, which takes ranges in the place of masks."""
    from fcsd.kernels.decode.attention import attend as attend_to_keys  # Triton is imported only where its kernels run

    return (attend_to_latents if isinstance(module, KeptLatents) else attend_to_keys)(module, *states, **options)


def why_not_split(model: PreTrainedModel) -> str | None:
    """The reason why a model cannot use the attention ``split``; None if it can."""
    attention = model.config.get_text_config()._attn_implementation
    if attention != ORDINARY:
        return f"its attention is {attention}"
    return None if model.device.type == "cuda" else "it is not on a GPU"


def usual_attention(model: PreTrainedModel) -> str:
    """How the decoding steps of a model attend if nobody says otherwise: by ``split``, which is faster, if they can."""
    return GROUPED if why_not_split(model) else SPLIT


@contextmanager
def attention_of_step(model: PreTrainedModel, kind: str) -> Iterator[None]:
    """Inside the block, a model whose attention is ``sdpa`` uses another one; every other model stays as it is.

    Args:
        kind: ``grouped`` for ``attend``, or ``split`` for ``attend_split``.
    """
    config: Any = model.config.get_text_config()
    if config._attn_implementation != ORDINARY:
        assert kind == GROUPED, "other attention does not take ranges"
        yield
        return
    name, layers = f"fcsd_{kind}", decoder_layers(model)
    AttentionInterface.register(name, attend_split if kind == SPLIT else attend)
    keep_latents(layers, kind == SPLIT)
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = ORDINARY
        keep_latents(layers, kept=False)
