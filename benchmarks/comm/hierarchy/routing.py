"""Routing for the benchmark: experts that tokens choose at random, or by topics whose popularity changes over time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TOPICS = 32
_STRENGTH = 3.0  # what a preferred expert has more than the others; random scores have a standard deviation of 1.3
_PEAK = 1.5  # the most popular topic has e ** (2 * _PEAK) times as many tokens as the least popular one
PERIOD = 64  # after this many steps each topic is as popular as at the start


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts.

    Attributes:
        experts: routed experts of the layer.
        top_k: experts of a token.
        topical: whether a token has a topic, which prefers ``2 * top_k`` experts that lie anywhere. Otherwise every
            expert is as likely as any other.
    """

    experts: int
    top_k: int
    topical: bool = False

    def choose(self, tokens: int, rank: int, step: int, device: torch.device) -> Tensor:
        """The experts of a rank's tokens in a step, ``[tokens, top_k]``, distinct for each token."""
        own = torch.Generator(device).manual_seed(1000 * step + rank)
        uniform = torch.rand(tokens, self.experts, generator=own, device=device)
        scores = -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))  # Gumbel noise: choices without replacement
        if self.topical:
            shared = torch.Generator(device).manual_seed(0)
            order = torch.rand(TOPICS, self.experts, generator=shared, device=device).argsort(dim=1)
            preferred = torch.zeros_like(order, dtype=torch.float32).scatter_(1, order[:, : 2 * self.top_k], _STRENGTH)
            angles = 2 * math.pi * (torch.arange(TOPICS, device=device) / TOPICS - step / PERIOD)
            popularity = (_PEAK * angles.cos()).softmax(dim=0)
            topic = torch.multinomial(popularity, tokens, replacement=True, generator=own)
            scores += preferred[topic]
        return scores.topk(self.top_k, dim=1).indices
