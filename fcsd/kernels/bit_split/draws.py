"""Random numbers for stochastic rounding that depend on what is rounded, and not on when or where.

Philox-4x32-10 (Salmon et al., SC 2011) turns a key and a counter into four words of 32 bits. The key is the run's
seed. The counter names the eight values that are rounded: their place in the row, the row, the step, the layer and
the direction. So no schedule, no recompute and no resume changes a bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key's halves grow by from round to round
_ROUNDS = 10


@dataclass(frozen=True)
class Draws:
    """What the random numbers of an exchange depend on.

    Args:
        seed: of the run, below 2^63.
        step: optimizer step, below 2^31.
        layer: of the model, below 2^27.
        direction: of the rows, 0 to 15: dispatch, combine, and the gradients of either.
        pair: int64 ``[n]``, the number ``token * top_k + k`` of each row, below 2^31, with the token's number among
            all ranks.
    """

    seed: int
    step: int
    layer: int
    direction: int
    pair: Tensor

    @property
    def lane(self) -> int:
        """Layer and direction in one word."""
        return self.layer * 16 + self.direction

    def uniform(self, width: int) -> Tensor:
        """Multiples of 2^-16 from 0 to below 1, fp32 ``[n, width]``: of each eight values, two in each word."""
        place = torch.arange(width // 8, device=self.pair.device).expand(len(self.pair), -1)
        pair = (self.pair[:, None] & _WORD).expand_as(place)
        words = torch.stack(philox(self.seed, place, pair, self.step, self.lane), dim=2)
        halves = torch.stack([words & 0xFFFF, words >> 16], dim=3)
        return halves.view(len(self.pair), width).float() * 2.0**-16


def philox(seed: int, place: Tensor, pair: Tensor, step: int, lane: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits, int64 as ``place``, of the counter ``(place, pair, step, lane)``."""
    a, b, c, d = place, pair, torch.full_like(place, step), torch.full_like(place, lane)
    low, high = seed & _WORD, seed >> 32
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # the sign of int64 is the highest of 64 bits
        a, b = ((second >> 32) & _WORD) ^ b ^ low, second & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ high, first & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return a, b, c, d
