"""Random numbers for stochastic rounding that depend on the values' identity, not on the time or the rank.

Philox-4x32-10 (Salmon et al., SC 2011) computes four words of 32 bits from a key and a counter. The key is the seed of
the run. The counter identifies the eight values that are rounded: their place in the row, the row, the step, the layer
and the direction. The numbers are therefore the same under every schedule, in a recompute and after a resume.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what is added to the halves of the key in every round
_ROUNDS = 10


@dataclass(frozen=True)
class Draws:
    """The values on which the random numbers of an exchange depend.

    Args:
        seed: the seed of the run, below 2^63.
        step: the optimizer step, below 2^31.
        layer: the index of the decoder layer, below 2^27.
        direction: a number from 0 to 15 for the direction of the rows: dispatch, combine, and the gradients of both.
        pair: int64 ``[n]``, the number ``token * top_k + k`` of each row, below 2^31. Tokens are numbered over all
            ranks.
    """

    seed: int
    step: int
    layer: int
    direction: int
    pair: Tensor

    @property
    def lane(self) -> int:
        """The layer and the direction in one 32-bit word."""
        return self.layer * 16 + self.direction

    def uniform(self, width: int) -> Tensor:
        """Multiples of 2^-16 in [0, 1), fp32 ``[n, width]``; each word of 32 bits gives two of them."""
        place = torch.arange(width // 8, device=self.pair.device).expand(len(self.pair), -1)
        pair = (self.pair[:, None] & _WORD).expand_as(place)
        words = torch.stack(philox(self.seed, place, pair, self.step, self.lane), dim=2)
        halves = torch.stack([words & 0xFFFF, words >> 16], dim=3)
        return halves.view(len(self.pair), width).float() * 2.0**-16


def philox(seed: int, place: Tensor, pair: Tensor, step: int, lane: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of 32 bits for the counter ``(place, pair, step, lane)``, int64, in the shape of ``place``."""
    a, b, c, d = place, pair, torch.full_like(place, step), torch.full_like(place, lane)
    low, high = seed & _WORD, seed >> 32
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # int64 holds all 64 bits of the product
        a, b = ((second >> 32) & _WORD) ^ b ^ low, second & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ high, first & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return a, b, c, d
