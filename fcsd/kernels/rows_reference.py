"""The reference of ``rows.py`` in torch: it moves the same rows on every device, without a Triton kernel.

``permute`` and ``unpermute`` are differentiable. ``spread``, ``collect`` and ``dots`` are not: autograd functions call
them. They compute in fp32, or in fp64 if the rows are fp64, and round once.
"""

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
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) * weight.reshape(-1, 1)[order].to(wide)).to(rows.dtype)


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
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (by_token * weight.unsqueeze(2).to(wide)).sum(dim=1).to(rows.dtype)


def spread(tokens: Tensor, weight: Tensor | None, row_of: Tensor, rows: Tensor) -> None:
    """Copy every token to its rows, as ``rows.spread`` does. A row that belongs to no token gets any token's values."""
    if not len(tokens):
        return
    most, count = row_of.shape[1], len(rows)
    places = row_of.new_zeros(count + 1)  # the last one takes the places that have no row
    numbers = torch.arange(row_of.numel(), device=row_of.device)
    places.scatter_(0, torch.where(row_of < 0, count, row_of).view(-1), numbers)
    places = places[:count]
    values = tokens[places // most]
    if weight is not None:
        wide = torch.promote_types(rows.dtype, torch.float32)
        values = values.to(wide) * weight.reshape(-1, 1)[places].to(wide)
    rows.copy_(values)


def collect(rows: Tensor, weight: Tensor | None, row_of: Tensor, tokens: Tensor) -> None:
    """Sum the rows of every token into ``tokens``, in the order of k, as ``rows.collect`` does."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(tokens.shape, dtype=wide, device=rows.device)
    for k in range(row_of.shape[1] if len(rows) else 0):
        values = rows[row_of[:, k].clamp(min=0)].to(wide)
        if weight is not None:
            values = values * weight[:, k, None].to(wide)
        total += torch.where(row_of[:, k, None] < 0, 0.0, values)
    tokens.copy_(total)


def dots(tokens: Tensor, rows: Tensor, row_of: Tensor) -> Tensor:
    """The scalar product of each token with each of its rows, ``[tokens, most]``; 0 where there is no row."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = torch.zeros(row_of.shape, dtype=wide, device=rows.device)
    for k in range(row_of.shape[1] if len(rows) else 0):
        values = (tokens.to(wide) * rows[row_of[:, k].clamp(min=0)].to(wide)).sum(dim=1)
        found[:, k] = torch.where(row_of[:, k] < 0, 0.0, values)
    return found
