"""What carries rows to the experts and back in one pass through one MoE block.

``Dispatcher`` is the interface that the schedule in ``overlap.py`` and the blocking reference in ``blocking.py`` call;
``flat.py`` implements it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.transports.transport import Transport, all_to_all

Mode = Literal["on", "eager-sync", "off"]


@dataclass(frozen=True)
class Wire:
    """How the rows of a layer travel.

    Args:
        transport: what moves them.
        mode: ``on`` awaits every exchange where its rows are first used; ``eager-sync`` is the same code but awaits
            every exchange where it starts; ``off`` is the blocking reference, which uses no transport.
        side: the CUDA stream for work that must not wait for the compute stream; None on other devices and for ``off``.
        fused: permute and unpermute rows by the kernels of ``fcsd.kernels.rows`` instead of by torch.
    """

    transport: Transport = all_to_all
    mode: Mode = "on"
    side: torch.cuda.Stream | None = None
    fused: bool = False


class Dispatcher(Protocol):
    """One pass of a batch through the routed experts of one layer.

    Its construction routes the tokens, starts to exchange the counts, and packs the rows. Then the schedule calls
    ``advance`` at least once, ``run_experts`` once, ``advance`` any number of times, and ``land`` once.
    """

    def advance(self, awaited_at: int | None) -> None:
        """Start the exchanges that can start now. The schedule calls it at each of its places.

        The first call waits for the counts and starts dispatch. A dispatcher of several levels forwards, in a later
        call, rows that have arrived since; for any other dispatcher later calls do nothing.

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
        """Await combine, and sum the weighted outputs of each token's experts: ``[batch, seq, hidden]``."""
        ...


# (block, 0-based index of the layer, normalised input [batch, seq, hidden], wire) -> the dispatcher of this pass
MakeDispatcher = Callable[[ExpertBlock, int, Tensor, Wire], Dispatcher]
