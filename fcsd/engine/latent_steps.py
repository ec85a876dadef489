"""Latent attention (MLA) of a decoding step, which does not expand the latents in the cache.

transformers' modules expand the latents of all tokens to the keys and values of every head, in every step. In a step,
an attention with the mixin of this module hands the latents themselves to its attention function. That function
projects the queries instead, and the sums of the latents, as ``fcsd.kernels.decode.latents`` describes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.models.class_swap import swap_classes
from fcsd.models.fused.latent import is_latent


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
