"""Computes causal attention inside the documents of packed rows, without a mask.

transformers turns position ids that restart into a mask ``[batch, 1, seq, seq]``. With a mask, attention computes all
of the ``seq * seq`` scores, and its backward pass is several times slower than that of causal attention. Here the
documents of all rows are concatenated and passed to FlashAttention's kernel for sequences of different lengths, which
computes only the scores inside documents. If each row is one document, plain causal attention is used.

The borders of documents reach the attention function through the keyword arguments that every decoder of transformers
passes on. A layer that is recomputed in the backward pass therefore gets them too. Without borders the function calls
transformers' own ``sdpa``, so generation and scoring do not change.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "packed"
_HALF = (torch.bfloat16, torch.float16)


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Let a model accept ``borders``, if each of its layers attends to all earlier tokens of the document.

    Returns: whether the model accepts them. A model with windows, chunks or sinks, or one that was not loaded with
        ``sdpa``, is not changed.
    """
    if not attends_to_all(model.config) or model.config._attn_implementation not in ("sdpa", NAME):
        return False
    model.set_attn_implementation(register_packed_attention())
    return True


def register_packed_attention() -> str:
    """Make the attention function known to transformers, and return its name."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return NAME


def takes_borders(model: PreTrainedModel) -> bool:
    """Whether ``use_packed_attention`` has prepared a model, also if its attention function was wrapped afterwards."""
    return (model.config._attn_implementation or "").endswith(NAME)


def document_borders(position_ids: Tensor) -> Tensor:
    """The index at which each document begins in the concatenated rows, and their length: ``[documents + 1]`` int32.

    Args:
        position_ids: ``[batch, seq]`` on the host. They restart at 0 with every document; every row begins a document.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([position_ids.numel()])]).to(torch.int32)


def packed_arguments(borders: Tensor) -> dict[str, Any]:
    """The keyword arguments with which a decoder is called besides token ids and position ids.

    The attention mask in them is not read. transformers passes a mask of four dimensions on unchanged. Without it the
    decoder would look for restarts in the position ids, for which the host would wait for the device.
    """
    return {"borders": borders, "attention_mask": borders.new_zeros((1, 1, 1, 1), dtype=torch.bool)}


def attend(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float | None = None) -> Tensor:
    """Attention of each token to itself and to the earlier tokens of its document.

    Args:
        query: ``[batch, heads, seq, width]``; key: ``[batch, key_heads, seq, width]``, where each key head serves
            ``heads / key_heads`` neighbouring heads; value: ``[batch, key_heads, seq, value_width]`` with
            ``value_width <= width``.
        borders: the result of ``document_borders``, on the same device.
        scale: the factor of the scores; None is ``width ** -0.5``.

    Returns: ``[batch, seq, heads, value_width]`` in the inputs' dtype.
    """
    batch, _, seq, width = query.shape
    if len(borders) - 1 == batch:  # one document in each row
        grouped = query.shape[1] != key.shape[1]
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        return found.transpose(1, 2)
    if not (query.is_cuda and query.dtype in _HALF):
        return attend_masked(query, key, value, borders, scale)
    narrow = value.shape[-1]
    if narrow < width:
        value = F.pad(value, (0, width - narrow))  # the kernel needs one width for all three; torch copies in any case
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    found = torch.ops.aten._flash_attention_forward(q, k, v, borders, borders, seq, seq, 0.0, True, False, scale=scale)[
        0
    ]
    return found[..., :narrow].unflatten(0, (batch, seq))


def attend_masked(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float | None = None) -> Tensor:
    """The reference of ``attend``: torch's attention with a mask, on any device and in any dtype."""
    batch, heads, seq, _ = query.shape
    places = torch.arange(batch * seq, device=query.device)
    document = torch.bucketize(places, borders[1:].long(), right=True).view(batch, seq)
    order = torch.arange(seq, device=query.device)
    mask = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order[None, :])
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scale)
    return found.transpose(1, 2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    borders: Tensor | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function, with the interface that transformers expects."""
    if borders is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **others)
    return attend(query, key, value, borders, scaling).contiguous(), None


def attends_to_all(model_config: PretrainedConfig) -> bool:
    """Whether every layer attends to all tokens before a token, that is, has no window and no chunks.

    Linear attention, a short convolution and an MLP have neither, and call no attention function.
    """
    config = model_config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) - {"linear_attention", "conv", "mlp", "moe"} == {"full_attention"}
    return getattr(config, "sliding_window", None) is None and getattr(config, "attention_chunk_size", None) is None
