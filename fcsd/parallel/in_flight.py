"""The full residual stream while its last output may still be in flight."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]


class InFlight:
    """A full stream whose last output may still be in flight.

    Under activation checkpointing ``land`` is called inside the *next* layer, but the tensors that it saves for the
    backward pass belong to the layer that launched the output. ``land`` therefore uses the saved-tensor hooks that were
    active when this object was made. The full stream is kept, because a recompute of the next layer reads it again.

    Args:
        land: waits for the output and returns the stream ``[batch, seq, hidden]``; called once.
    """

    def __init__(self, land: Callable[[], Tensor]) -> None:
        self._land: Callable[[], Tensor] | None = land
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)
        self._full: Tensor | None = None

    def land(self) -> Tensor:
        """The full stream ``[batch, seq, hidden]``; the first call waits."""
        if self._land is not None:
            hooks = nullcontext() if self._hooks is None else torch.autograd.graph.saved_tensors_hooks(*self._hooks)
            with hooks:
                self._full = self._land()
            self._land = self._hooks = None
        assert self._full is not None
        return self._full
