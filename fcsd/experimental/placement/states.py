"""Finds the tensors that belong to the experts of this rank: the weights, and the optimizer's fp32 weights and moments.

Every DeepSpeed optimizer that a recipe can choose keeps them in another place. All of them are contiguous tensors with
the elements of a parameter in its own order, or an interval of them.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from fcsd.distill.train_engine import TrainEngine
from fcsd.experimental.placement.moving import Share
from fcsd.parallel.expert.block import ExpertBlock


def expert_shares(engine: TrainEngine, block: ExpertBlock) -> dict[str, Share]:
    """What this rank holds of the tensors of a block's experts, by names that are the same on every rank. No copies.

    Call this after the first step of the optimizer, which creates the moments.
    """
    shares = {}
    for name, parameter in block.experts.named_parameters():
        shares[name] = Share(0, parameter.data.view(-1))
        for kind, start, values in _states(engine, parameter):
            shares[f"{name} {kind}"] = Share(start, values.detach())
    return shares


def _states(engine: TrainEngine, parameter: nn.Parameter) -> Iterator[tuple[str, int, Tensor]]:
    """The optimizer's tensors for a parameter: what they are, the first element that this rank holds, and the values.

    - ZeRO concatenates parameters and gives each rank an interval, which ``_hp_mapping`` describes. It is None if no
      element of the parameter is in this rank's interval.
    - In bf16 without ZeRO a wrapper pairs each parameter with an fp32 copy.
    - In fp32 without ZeRO the optimizer is torch's own.
    """
    if hasattr(parameter, "_hp_mapping"):
        mapping: Any = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if mapping is None:
            return
        inner = engine.optimizer.optimizer
        (flat,) = inner.param_groups[mapping.param_group_index]["params"]
        start, own = mapping.lp_fragment_address.start, mapping.hp_fragment_address
        for kind, values in _with_moments(inner, flat):
            yield kind, start, values.narrow(0, own.start, own.numel)
    elif hasattr(engine.optimizer, "fp16_groups"):
        wrapper = engine.optimizer
        pairs = zip(chain(*wrapper.fp16_groups), chain(*wrapper.fp32_groups), strict=True)
        master = next(master for weights, master in pairs if weights is parameter)
        for kind, values in _with_moments(wrapper.optimizer, master):
            yield kind, 0, values.view(-1)
    else:
        for kind, values in _with_moments(engine.optimizer, parameter):
            if values is not parameter:
                yield kind, 0, values.view(-1)


def _with_moments(optimizer: Any, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor that torch's optimizer updates, and the tensors of its state that have an entry for each element."""
    yield "master", weights
    for kind, values in sorted(optimizer.state[weights].items()):
        if isinstance(values, Tensor) and values.shape == weights.shape:
            yield kind, values
