"""Attention of a decoding step: without repeated keys, or by a kernel that reads only the keys of each slot.

transformers 5.17 repeats keys and values for every query head where there is a mask, as in every step that decodes in
slots. For Llama-3 70B it thereby writes and reads eight times the keys and values that the cache holds. A single query
token needs no repetition: the query heads of one key-value head take the place of queries, ``[batch, key-value heads,
query heads for each, head size]``. transformers 5.23 does the same by itself. torch's kernel for this reads all keys up
to the width of the step, and one program reads all keys of a slot and key-value head.

``split`` stands for the kernel of ``fcsd.kernels.decode.attention``, which divides the keys of a slot between programs.

In models with latent attention (MLA) it does not expand the latents in the cache. transformers' modules expand the
latents of all tokens to the keys and values of every head, in every step. With the mixin ``KeptLatents`` an attention
hands the latents themselves to its attention function. That function projects the queries instead, and the sums of the
latents, as ``fcsd.kernels.decode.latents`` describes.
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
from fcsd.models.class_swap import swap_classes
from fcsd.models.fused.latent import is_latent

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


def attend_to_latents(
    module: Any, query: Tensor, latent: Tensor, shared: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers for modules that keep latents.

    Args:
        query: ``[rows, heads, 1, own + rotated]``.
        latent: ``[rows, 1, keys, rank]``.
        shared: the rotated parts of the keys, ``[rows, 1, keys, rotated]``.
        attention_mask: the ranges in the place of a mask, ``[rows, 1, 1, 2]``.

    Returns: ``[rows, 1, heads, value size]``, and None for the weights.
    """
    from fcsd.kernels.decode.latents import latent_attention  # Triton is imported only where its kernels run

    own, rank = module.qk_nope_head_dim, module.kv_lora_rank
    projections = module.kv_b_proj.weight.view(-1, own + module.v_head_dim, rank)  # one for each head
    to_keys, to_values = projections[:, :own], projections[:, own:]
    own_part, rotated = query[:, :, 0].split([own, query.shape[-1] - own], dim=-1)
    projected = torch.bmm(own_part.transpose(0, 1), to_keys).transpose(0, 1)
    ranges = attention_mask[:, 0, 0]
    found = latent_attention(projected, rotated, latent[:, 0], shared[:, 0], ranges, options["scaling"])
    return torch.bmm(found.transpose(0, 1), to_values.mT).transpose(0, 1)[:, None], None
