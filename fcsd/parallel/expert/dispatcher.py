"""Defines the interface of a dispatcher, which sends rows to the experts and back in one pass through a MoE block.

``Dispatcher`` is the interface that the schedule in ``overlap.py`` and the blocking reference in ``blocking.py`` call;
``flat.py`` and ``hierarchical.py`` implement it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.quantised.rows import Quantiser
from fcsd.parallel.transports.traffic import Traffic
from fcsd.parallel.transports.transport import Transport, all_to_all

Mode = Literal["on", "eager-sync", "off"]


@dataclass(frozen=True)
class Wire:
    """How the rows of a layer travel.

    Args:
        transport: the function that sends the rows.
        mode: ``on`` awaits every exchange where its rows are first used. ``eager-sync`` runs the same code but awaits
            every exchange where it starts. ``off`` is the blocking reference, which uses no transport.
        side: the CUDA stream for work that must not wait for the compute stream; None on other devices and for ``off``.
        fused: whether the kernels of ``fcsd.kernels.rows`` permute and unpermute rows, instead of torch.
        quantiser: rounds the rows to the formats of the wire, also if there is one rank only; None sends them as they
            are.
        traffic: counts the bytes that are sent; None does not count.
    """

    transport: Transport = all_to_all
    mode: Mode = "on"
    side: torch.cuda.Stream | None = None
    fused: bool = False
    quantiser: Quantiser | None = None
    traffic: Traffic | None = None


class Dispatcher(Protocol):
    """One pass of a batch through the routed experts of one layer.

    The constructor routes the tokens, starts to exchange the counts, and packs the rows. Then the schedule calls
    ``advance`` at least once, ``run_experts`` once, ``advance`` any number of times, and ``land`` once.
    """

    def advance(self, awaited_at: int | None) -> None:
        """Start the exchanges that can start now. The schedule calls it at each of its places.

        The first call waits for the counts and starts dispatch. In a later call, a dispatcher of several levels
        forwards the rows that have arrived. For any other dispatcher later calls do nothing.

        Args:
            awaited_at: the place in the backward pass where the gradient of dispatch is awaited, from ``order.mark``.
        """
        ...

    def run_experts(self, awaited_at: int | None) -> None:
        """Await dispatch, run this rank's experts, and start combine.

        Args:
            awaited_at: the place in the backward pass where the gradient of combine is awaited.
        """
        ...

    def land(self) -> Tensor:
        """Await combine, and return the weighted sum of each token's expert outputs, ``[batch, seq, hidden]``."""
        ...


# Makes the dispatcher of one pass from (block, 0-based layer index, normalised input [batch, seq, hidden], wire).
MakeDispatcher = Callable[[ExpertBlock, int, Tensor, Wire], Dispatcher]
