"""The reference of ``rows.py`` in torch: it moves the same rows on every device, without a Triton kernel."""

import torch
from torch import Tensor


def permute(tokens: Tensor, weight: Tensor | None, order: Tensor, top_k: int) -> Tensor:
    """Copy every token to the rows of its experts: ``[tokens, width] -> [tokens * top_k, width]``.

    Args:
        weight: ``[tokens, top_k]`` factors of the rows, multiplied in fp32; None leaves the rows as they are.
        order: ``[tokens * top_k]``, the (token, k) pair ``t * top_k + k`` that each row holds.
    """
    rows = tokens[order // top_k]
    if weight is None:
        return rows
    return (rows.float() * weight.reshape(-1, 1)[order].float()).to(rows.dtype)


def unpermute(rows: Tensor, weight: Tensor | None, order: Tensor, top_k: int) -> Tensor:
    """Sum the rows of every token: ``[tokens * top_k, width] -> [tokens, width]``; arguments are those of ``permute``.

    With a weight, products and sums are computed in fp32 and rounded once. Without a weight torch sums in the dtype of
    the rows.
    """
    width = rows.shape[-1]
    by_token = torch.zeros(len(order), width, dtype=rows.dtype, device=rows.device)
    by_token[order] = rows
    by_token = by_token.view(-1, top_k, width)
    if weight is None:
        return by_token.sum(dim=1)
    return (by_token * weight.unsqueeze(2).float()).sum(dim=1).to(rows.dtype)
