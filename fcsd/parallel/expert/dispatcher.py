"""Defines how rows go to the experts of a layer and back: pack, dispatch, combine, land.

Each step returns what the next one takes, so nothing of a pass is kept anywhere else. ``flat.py`` and
``hierarchical.py`` are the two ways. The schedule in ``overlap.py`` and the blocking reference in ``blocking.py`` call
the steps:

    packed = dispatcher(block, layer, x, transfer)   routes and packs the rows
    handle = packed.dispatch(...)                    sends them
    combined = handle.combine(...)                   runs the experts, and sends their outputs back
    combined.land()                                  the weighted sums of the tokens
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fcsd.config import Parallel
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of, experts_of
from fcsd.parallel.deferred import Deferred, Exchange, exchange_now, launch
from fcsd.parallel.expert.autoep import expert_parallel_config
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.quantised import Formats, Quantiser
from fcsd.parallel.transports.transport import Splits, Traffic, Transport, all_to_all

Mode = Literal["on", "eager-sync", "off"]


@dataclass(frozen=True)
class Transfer:
    """How the rows of a layer travel.

    Args:
        transport: the function that sends the rows.
        mode: ``on`` awaits every exchange where its rows are first used. ``eager-sync`` runs the same code but awaits
            every exchange where it starts. ``off`` is the blocking reference, which uses no transport.
        side: the CUDA stream for work that must not wait for the compute stream; None on other devices and for ``off``.
        fused: whether the kernels of ``fcsd.kernels.rows`` permute and unpermute rows, instead of torch.
        quantiser: rounds the rows to the formats of quantised communication, also if there is one rank only; None sends
            them as they are.
        traffic: counts the bytes that are sent; None does not count.
    """

    transport: Transport = all_to_all
    mode: Mode = "on"
    side: torch.cuda.Stream | None = None
    fused: bool = False
    quantiser: Quantiser | None = None
    traffic: Traffic | None = None

    def exchange(self, name: str, layer: int, group: Any, there: Splits, back: Splits, kept: bool) -> Exchange:
        """An exchange that travels in this way, without codecs; the arguments are those of ``Exchange``."""
        eager = self.mode == "eager-sync"
        return Exchange(name, layer, group, there, back, kept, self.transport, eager, traffic=self.traffic)

    def send(self, rows: Tensor, exchange: Exchange, awaited_at: int | None) -> Deferred:
        """Start to send ``rows [sent, hidden]``; without overlap, also wait.

        Args:
            awaited_at: the place in the backward pass where the gradient of the rows is awaited, from ``order.mark``.
        """
        if self.mode == "off":
            return Deferred(exchange_now(rows, exchange), None)
        return launch(rows, exchange, awaited_at)


class Combined(Protocol):
    """Outputs of experts on their way back."""

    def forward(self) -> Self:
        """See ``Dispatched``; here the rows are on their way back."""
        ...

    def land(self) -> Tensor:
        """Await combine: the weighted sum of each token's expert outputs, ``[batch, seq, hidden]``."""
        ...


class Dispatched(Protocol):
    """Rows on their way to the experts: the handle that dispatch returns, with all that combine needs."""

    def forward(self) -> Self:
        """The schedule calls it at each of its places. With several levels, it forwards rows to the next one."""
        ...

    def combine(self, awaited_at: int | None) -> Combined:
        """Await dispatch, run this rank's experts, and start combine.

        Args:
            awaited_at: the place in the backward pass where the gradient of combine is awaited.
        """
        ...


class Packed(Protocol):
    """The packed rows of one pass, while the ranks exchange their counts."""

    def dispatch(self, awaited_at: int | None) -> Dispatched:
        """Wait for the counts, and start dispatch.

        Args:
            awaited_at: the place in the backward pass where the gradient of dispatch is awaited, from ``order.mark``.
        """
        ...


class Dispatcher(Protocol):
    """Routes the tokens of one pass through a MoE block, starts to exchange the counts, and packs the rows."""

    def __call__(self, block: ExpertBlock, layer: int, x: Tensor, transfer: Transfer, /) -> Packed:
        """Pack the rows.

        Args:
            layer: 0-based index of the decoder layer.
            x: normalised input ``[batch, seq, hidden]``.
        """
        ...


def check_divided(model: PretrainedConfig, name: str, parallel: Parallel, processes: int, hint: str) -> None:
    """Check that processes and a model suit ``parallel.ep_size``. Only the config is read.

    Args:
        hint: what to set for a model that does not support expert parallelism.

    Raises:
        ConfigError: the size does not divide the number of processes or of experts, or the model does not support
            expert parallelism.
    """
    degree, experts = parallel.ep_size, experts_of(model)
    if degree == 1:
        return
    if processes % degree:
        raise ConfigError(
            f"parallel.ep_size {degree} does not divide the {processes} processes",
            f"start a multiple of {degree}, with --gpus, or lower parallel.ep_size",
        )
    try:
        expert_parallel_config(arch_of(model), degree)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", hint) from error
    if experts % degree:
        raise ConfigError(
            f"parallel.ep_size {degree} does not divide the {experts} experts of {name}",
            f"for {processes} processes: parallel.ep_size {math.gcd(processes, experts)}",
        )


def check_formats(formats: Formats, model: PretrainedConfig, name: str) -> None:
    """Check that the rows of a model can be rounded.

    Raises:
        ConfigError: the model has no experts, or has experts that no dispatcher can reach, or the groups of a format do
            not divide its rows.
    """
    try:
        expert_parallel_config(arch_of(model), ep_size=1)
        formats.check_width(model.get_text_config().hidden_size)
    except ConfigError as error:
        raise ConfigError(f"parallel.quantised: {name}: {error}", error.hint or "remove parallel.quantised") from error
