"""The reference of ``copies.py`` in torch: it numbers the copies of deduplicated rows, and writes their tails."""

import torch
from torch import Tensor

from fcsd.kernels import Copies


def number_copies(experts: Tensor, groups: int, span: int, choices: int) -> Copies:
    """The copies of rows, numbered by group first and then in the order of the rows. The host waits for nothing.

    Args:
        experts: ``[rows, choices of a row]``, the place of each expert among ``groups * span``, or -1.
        span: the number of experts of a group.
        choices: the number of entries of a copy's tail.
    """
    experts = experts.long()
    group = torch.where(experts < 0, groups, experts // span)  # the last column stands for "no expert"
    chosen = experts.new_zeros(len(experts), groups + 1, dtype=torch.bool).scatter_(1, group, True)
    chosen[:, groups] = False
    number = (chosen.T.reshape(-1).cumsum(0) - 1).view(groups + 1, -1).T
    number = torch.where(chosen, number, -1)
    earlier = (group.unsqueeze(2) == group.unsqueeze(1)).tril(-1).sum(dim=2)  # choices before this one, same group
    copy = number.gather(1, group)
    row_of = number.sort(dim=1, descending=True).values[:, : min(groups, experts.shape[1])]
    return Copies(row_of.contiguous(), torch.where(copy < 0, -1, copy * choices + earlier), experts % span)


def write_tails(weights: Tensor, experts: Tensor, of_rows: Tensor, copies: Copies) -> None:
    """Write the weights and the experts of all copies. The entries that no choice has become 0 and -1.

    Args:
        weights: ``[copies, choices of a copy]``, is written to.
        experts: int16 of the same shape, is written to.
        of_rows: ``[rows, choices of a row]``, the weights of the rows.
        copies: where the copies go.
    """
    _put(weights, of_rows, copies.entry_of, 0)
    _put(experts, copies.experts, copies.entry_of, -1)


def _put(entries: Tensor, values: Tensor, entry_of: Tensor, fill: int) -> None:
    """Write ``values [rows, choices of a row]`` to the entries ``[copies, choices]`` that ``entry_of`` names.

    All other entries become ``fill``.
    """
    count = entries.numel()
    flat = entries.new_full((count + 1,), fill)  # the last one takes the values that have no entry
    flat.scatter_(0, torch.where(entry_of < 0, count, entry_of).view(-1), values.to(entries.dtype).reshape(-1))
    entries.copy_(flat[:count].view(entries.shape))
