"""The variants of the training step: how the model is wired for each of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.train.step.workload import (
    BOUND,
    BY_HOST,
    COPIES,
    EAGER,
    FUSED,
    OVERLAPPED,
    STANDARD,
    STANDARD_COPIES,
    STOCK,
    TUNED,
    Workload,
)
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.models.build import unwired, wire
from fcsd.models.wiring import Wiring
from fcsd.parallel.all_reduce.host import sums_of
from fcsd.parallel.expert.autoep import expert_block
from fcsd.parallel.expert.dispatcher import Dispatcher
from fcsd.parallel.overlap import overlap
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.host import HostTransport, streams
from fcsd.parallel.transports.symmetric_memory import open_buffers
from fcsd.parallel.transports.transport import Several, Splits, Traffic, Work

Choices = dict[str, Callable[..., Any]]  # name of a variant -> function that wires the model for it


def eager_name(name: str) -> str:
    """The name of the eager-sync variant that computes the same as an overlapped one."""
    base, plus, changes = name.partition("+")
    return EAGER + (FUSED if base.endswith(FUSED) else "") + plus + changes


def variants(model: PreTrainedModel, load: Workload, dispatcher: Dispatcher, traffic: Traffic | None = None) -> Choices:
    """For the name of every variant, a function that wires the model for it.

    Args:
        dispatcher: carries the rows in all variants, except in the stock layer and the bound.
        traffic: counts the bytes that dispatch and combine send; None does not count.
    """
    standard, farskip = unwired(), Wiring("farskip", tuple(range(load.layers)))

    copies = CopiesTransport(open_buffers)
    sending = partial(overlap, model, dispatcher=dispatcher, traffic=traffic)
    ours = {
        STANDARD: partial(sending, standard, "eager-sync"),
        STANDARD_COPIES: partial(sending, standard, "eager-sync", transport=copies),
        EAGER: partial(sending, farskip, "eager-sync"),
        OVERLAPPED: partial(sending, farskip),
        COPIES: partial(sending, farskip, transport=copies),
        BY_HOST: lambda **how: sending(farskip, transport=HostTransport(sums_of, streams()), **how),
        BOUND: partial(overlap, model, farskip, transport=NoExchange()),
    }
    fused = {name + FUSED: partial(make, fused=True) for name, make in ours.items()}
    return {STOCK: partial(_stock, model, tuned=False), TUNED: partial(_stock, model, tuned=True), **ours, **fused}


def _stock(model: PreTrainedModel, tuned: bool) -> None:
    """AutoEP's own layers under the standard wiring, with its defaults or with the options that it offers for speed."""
    wire(model, unwired())
    tune_autoep(model, tuned)


def tune_autoep(model: PreTrainedModel, tuned: bool, gate_up: str = "separate") -> None:
    """Give AutoEP's own layers their defaults, or the options that AutoEP offers for speed.

    These are ``combine_impl: fused_weighted_sum``, one kernel that weighs and adds the rows of a token, and
    ``async_split_plan``, which reads the sizes of an exchange while rows are packed. Its other backend for
    exchanges, ``deepep``, needs a package that no index has.

    Args:
        gate_up: AutoEP's ``gate_up_impl``; ``fused`` joins two matrices of weights in every pass, for one product.
    """
    layers: list[Any] = [module for module in model.modules() if expert_block(module) is not None]
    for layer in layers:
        layer.combine_impl = "fused_weighted_sum" if tuned else "weighted_sum"
        layer.async_split_plan = tuned
        layer.experts.gate_up_impl = gate_up


class NoExchange:
    """A transport that sends nothing. It returns rows of the right shape with finite values, without any work."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def __call__(self, rows: Tensor, splits: Splits, group: Any, keep: bool) -> tuple[Tensor, Work]:
        count = sum(splits.receives)
        if self._rows is None or self._rows.shape[0] < count:
            self._rows = torch.randn(2 * count, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return self._rows[:count], Several([])
