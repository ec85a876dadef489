"""Records which experts the tokens of a training step choose."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fcsd.parallel import order

K = TypeVar("K")


class RoutingRecord(Generic[K]):
    """The choices of some routers while ``on`` is active.

    Args:
        routers: the routers, by any key; they return scores, experts and counts.
    """

    def __init__(self, routers: Mapping[K, nn.Module]) -> None:
        self._chosen: dict[K, list[Tensor]] | None = None
        for key, router in routers.items():
            router.register_forward_hook(self._recorder(key))

    @contextmanager
    def on(self, keys: Mapping[K, Any]) -> Iterator[dict[K, list[Tensor]]]:
        """Within the block, record the choices of each micro-batch, int16 ``[tokens, top_k]``, for each key."""
        found: dict[K, list[Tensor]] = {key: [] for key in keys}
        self._chosen = found
        try:
            yield found
        finally:
            self._chosen = None

    def _recorder(self, key: K) -> Any:
        def record(router: nn.Module, _: Any, output: Any) -> None:
            # Neither evaluations nor the recompute of activation checkpointing are part of the step.
            if self._chosen is not None and router.training and not order.in_backward():
                self._chosen[key].append(output[1].to(torch.int16))

        return record
