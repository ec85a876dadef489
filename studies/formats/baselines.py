"""Two formats of other papers with which FlashCommunication V2 compares itself (section 4), as baselines of quality.

The functions return the values that the formats would deliver. They make no records and have no kernels. Both formats
would send as many bytes as ``Format(bits, group)``: codes, and two bf16 numbers for each group.
"""

import torch
from torch import Tensor

from fcsd.kernels.bit_split import reference
from fcsd.kernels.bit_split.format import Format


def hadamard(rows: Tensor, bits: int, group: int = 32) -> Tensor:
    """Round rows ``[n, width]`` to nearest after a rotation of each group by a Hadamard matrix (QuaRot). Returns fp32.

    The rotation spreads a large value over its group, and is undone after rounding.

    Raises:
        ConfigError: there is no such format, or the groups do not divide the row.
    """
    matrix = torch.ones(1, 1, device=rows.device)
    while len(matrix) < group:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix * group**-0.5  # symmetric and orthogonal, so it is its own inverse
    format, width = Format(bits, group), rows.shape[1]
    format.row_bytes(width)
    turned = (rows.float().view(-1, group) @ matrix).view(len(rows), width)
    back = reference.decode(reference.encode(turned, format), format, width, torch.float32)
    return (back.view(-1, group) @ matrix).view(len(rows), width)


def logfmt(rows: Tensor, bits: int, group: int = 32) -> Tensor:
    """Round rows ``[n, width]`` to LogFMT (DeepSeek-V3's hardware paper, section 3.2). Returns fp32.

    A code has a sign and ``bits - 1`` bits. It stands for zero, or for one of the levels between the least and the
    greatest magnitude of the group. Each level is the one below times a constant factor, and the greatest is at most
    2^32 times the least. A value is rounded to the nearest level.

    Raises:
        ConfigError: there is no such format, or groups do not divide the row.
    """
    Format(bits, group).row_bytes(rows.shape[1])
    x = rows.float().reshape(-1, group)
    size = x.abs()
    high = size.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    low = torch.where(size > 0, size, high).amin(1, keepdim=True).maximum(high * 2.0**-32)
    count = 2 ** (bits - 1) - 1  # levels besides zero; with 2 bits there is one, the greatest magnitude
    share = torch.linspace(0, 1, count, device=x.device) if count > 1 else torch.ones(1, device=x.device)
    levels = torch.exp(low.log() + share * (high.log() - low.log()))
    levels = torch.cat([torch.zeros_like(high), levels], dim=1)
    nearest = torch.searchsorted((levels[:, 1:] + levels[:, :-1]) / 2, size)
    return (levels.gather(1, nearest) * x.sign()).view(len(rows), rows.shape[1])
