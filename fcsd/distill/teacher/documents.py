"""Computes linear attention, and attention that chooses keys by their places, inside the documents of packed rows.

Other attention stays inside documents by its mask. The convolution and the state of linear attention would run on from
one document into the next, and blocks of keys would reach over the borders. Here the documents of all rows become rows
of their own, which end in padding. All are causal, so padding at the end changes no token before it. transformers' own
code computes these rows.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fcsd.models.fused import swap_classes
from fcsd.models.wiring import Blocks, LayerWiring, WiredLayer, hf_parts, is_linear, take_apart


class Documents(NamedTuple):
    """Where the tokens of packed rows are when every document is a row.

    Attributes:
        tokens: the token in each place, ``[documents, longest]``: its number in the concatenated packed rows. Places
            after the end of a document hold other tokens, whose results are not used.
        places: the number of each token's place, ``[batch * seq]``.
    """

    tokens: Tensor
    places: Tensor


class InsideDocuments(nn.Module):
    """An attention that takes ``documents``; a mixin that precedes transformers' own class."""

    unfused: type[nn.Module]

    def forward(self, hidden_states: Tensor, documents: Documents | None = None, **kwargs: Any) -> Any:
        """``[batch, seq, hidden]`` to the same shape; without ``documents`` each row is one document."""
        if documents is None:
            return super().forward(hidden_states=hidden_states, **kwargs)
        out = super().forward(hidden_states=hidden_states.flatten(0, 1)[documents.tokens], **kwargs)
        return out.flatten(0, 1)[documents.places].view_as(hidden_states)


def stay_inside_documents(layers: Any, blocks: Blocks | None = None) -> None:
    """Let the attentions of decoder layers that need it take ``documents``. The call can be repeated.

    Args:
        layers: changed in place.
        blocks: the names of a layer's children, if transformers' own layers do not hand ``documents`` on. These layers
            are taken apart then, which changes no bit of what they compute.
    """
    swap_classes(layers, InsideDocuments, is_linear, True)
    if blocks is None:
        return
    for layer in layers:
        # What stands in for a layer that is left out of a pass is no layer of transformers.
        if isinstance(layer, GradientCheckpointingLayer) and not isinstance(layer, WiredLayer):
            take_apart(layer, LayerWiring(0, 0, 1, False, partial(hf_parts, blocks), blocks))


def documents_of(borders: Tensor, tokens: int) -> Documents:
    """The documents of packed rows. The host waits for the device once.

    Args:
        borders: see ``document_borders``; documents may be empty.
    """
    starts, ends = borders[:-1].long(), borders[1:].long()
    longest = int((ends - starts).max())
    numbers = torch.arange(tokens, device=borders.device)
    document = torch.bucketize(numbers, ends, right=True)
    places = document * longest + numbers - starts[document]
    offsets = torch.arange(longest, device=borders.device)
    return Documents((starts[:, None] + offsets).clamp(max=tokens - 1), places)
