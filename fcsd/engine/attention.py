"""Attention of a decoding step by torch, without repeated keys and without expanded latents.

transformers 5.17 repeats keys and values for every query head where there is a mask, as in every step that decodes in
slots. For Llama-3 70B it thereby writes and reads eight times the keys and values that the cache holds. A single query
token needs no repetition: the query heads of one key-value head take the place of queries, ``[batch, key-value heads,
query heads for each, head size]``. transformers 5.23 does the same by itself.

In models with latent attention (MLA) transformers' modules expand the latents of all tokens to the keys and values of
every head, in every step. With the mixin ``KeptLatents`` an attention hands the latents themselves to its attention
function. A head's key is a projection of the latent of its token, and a rotated part that all heads share; its value is
another projection of the same latent. A product with a projected latent equals a product of the projected query with
the latent itself, and a weighted sum of projected latents is the projection of their weighted sum. So all heads attend
to the latents as they lie in the cache. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fcsd.models.build import decoder_layers
from fcsd.models.fused import is_latent, swap_classes

ORDINARY, OF_STEPS = "sdpa", "fcsd_step"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers, which returns what its ``sdpa`` returns.

    Args:
        query: ``[batch, heads, queries, head size]``.
        key: ``[batch, key-value heads, keys, head size]``, and ``value`` likewise. A module that keeps latents gives
            them, and the shared parts of its keys.
        attention_mask: additive, ``[batch, 1, queries, keys]``; None for no mask.

    Returns:
        ``[batch, queries, heads, head size]``, and None for the weights.
    """
    if isinstance(module, KeptLatents):
        return _attend_to_latents(module, query, key, value, attention_mask, options["scaling"]), None
    batch, heads, queries, size = query.shape
    shared = heads // key.shape[1]
    if queries != 1 or shared == 1 or options.get("position_bias") is not None:
        return ALL_ATTENTION_FUNCTIONS[ORDINARY](module, query, key, value, attention_mask, **options)
    query = query.reshape(batch, key.shape[1], shared, size)
    scaling = options.get("scaling")
    found = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def attention_of_step(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, a model whose attention is ``sdpa`` uses ``attend``; every other model stays as it is."""
    config: Any = model.config.get_text_config()
    if config._attn_implementation != ORDINARY:
        yield
        return
    layers = decoder_layers(model)
    AttentionInterface.register(OF_STEPS, attend)
    keep_latents(layers, kept=True)
    config._attn_implementation = OF_STEPS
    try:
        yield
    finally:
        config._attn_implementation = ORDINARY
        keep_latents(layers, kept=False)


class KeptLatents(nn.Module):
    """Latent attention that does not expand latents; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]  # the class that ``keep_latents(kept=False)`` restores

    def expand_kv(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """In the place of keys and values, the latents and the shared parts of the keys, as they are."""
        return latent, shared


def keep_latents(layers: Iterable[Any], kept: bool) -> None:
    """Let the latent attentions of layers keep latents, or restore their classes.

    A projection of latents that is no plain matrix, because it is quantised for example, still expands them.
    """
    swap_classes(nn.ModuleList(layer.self_attn for layer in layers), KeptLatents, _is_plain, kept)


def _is_plain(module: Any) -> bool:
    """Whether a module is a latent attention whose projection of latents is a matrix."""
    return is_latent(module) and type(module.kv_b_proj) is nn.Linear


def _attend_to_latents(
    module: Any, query: Tensor, latent: Tensor, shared: Tensor, attention_mask: Tensor | None, scale: float
) -> Tensor:
    """The attention of one query ``[rows, heads, 1, own + rotated]`` to latents ``[rows, 1, keys, rank]``.

    Args:
        shared: the rotated parts of the keys, ``[rows, 1, keys, rotated]``.

    Returns: ``[rows, 1, heads, value size]``.
    """
    own, rank = module.qk_nope_head_dim, module.kv_lora_rank
    projections = module.kv_b_proj.weight.view(-1, own + module.v_head_dim, rank)  # one for each head
    to_keys, to_values = projections[:, :own], projections[:, own:]
    own_part, rotated = query[:, :, 0].split([own, query.shape[-1] - own], dim=-1)
    projected = torch.bmm(own_part.transpose(0, 1), to_keys).transpose(0, 1)
    heads, keys = torch.cat([projected, rotated], -1)[:, None], torch.cat([latent, shared], -1)
    found = scaled_dot_product_attention(heads, keys, latent, attn_mask=attention_mask, scale=scale)[:, 0]
    return torch.bmm(found.transpose(0, 1), to_values.mT).transpose(0, 1)[:, None]
