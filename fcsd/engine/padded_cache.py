"""Functions for batches of prompts of different lengths: left padding, and selecting the rows of a cache."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and position ids, each ``[batch, width]``, of rows that are padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def select_rows(cache: DynamicCache, rows: torch.Tensor, batch: int) -> None:
    """Replace the ``batch`` rows of a cache by those at the indices ``rows``, in that order; indices may repeat.

    Layers with Desync wiring hold ``[ranks * batch, ...]``, one rank after the other.
    """
    layers: Any = cache.layers
    for layer in layers:
        ranks = layer.keys.shape[0] // batch
        indices = torch.cat([rows + rank * batch for rank in range(ranks)])
        layer.batch_select_indices(indices.to(layer.keys.device))  # a device map spreads layers over devices
