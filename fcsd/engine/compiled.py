"""Compiles what a decoding step computes between two reductions: each part of a layer with the norm before it.

``torch.compile`` fuses the many small kernels of a norm, of the rotary embedding and of the activation. A reduction is
never inside of what is compiled, so no compiler can move its start or its wait. All layers of a kind share one compiled
function: the modules are its arguments.

Attention, dense MLPs, shared experts and routers are compiled. Routed experts are not, because the number of rows of
each is known on the device alone. A function that cannot be compiled is computed as it is, after a warning.
"""

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.overrides import TorchFunctionMode

from fcsd.engine.sharded_modules import SplitNorm
from fcsd.foreign_errors import reason_of
from fcsd.models.installed import cache_keyword
from fcsd.models.wiring import GatedAttention

# How often one of the functions below may be compiled: once for each batch, degree, and length that attention reads.
_SHAPES = 64

log = logging.getLogger(__name__)


class OneLayer:
    """The keys and values of one layer, in the place of the cache of all layers.

    The number of a layer would be a constant of the compiled function, which would then be compiled for each layer.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As the method of transformers' ``Cache``, without the number of the layer."""
        return self.layer.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As the method of transformers' ``Cache``."""
        return self.layer.get_seq_length()


def possible(cache: Any, index: int) -> bool:
    """Whether a step with this cache has the same shapes as the steps before: one token in every slot of fixed size."""
    return cache is not None and getattr(cache.layers[index], "fixed_shape", False)


def attend(norm: nn.Module, attention: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """The output of an attention, ``[slots, 1, hidden]``, compiled together with the norm before it.

    Args:
        x: the residual stream ``[slots, 1, hidden]``.
        kwargs: what transformers' loop over layers passes to the attention, the cache among it.
    """
    index = attention.layer_idx
    keyword = cache_keyword()
    kwargs[keyword] = OneLayer(kwargs[keyword].layers[index])
    # A norm over all ranks reduces, and a gate is a hook; neither is compiled.
    if any(isinstance(module, SplitNorm | GatedAttention) for module in attention.modules()):
        return attention(hidden_states=compute(_normed, norm, x), **kwargs)[0]
    attention.layer_idx = 0
    try:
        return compute(_attended, norm, attention, x, **kwargs)
    finally:
        attention.layer_idx = index


def dense(norm: nn.Module, mlp: nn.Module, x: Tensor) -> Tensor:
    """The output of a dense MLP, compiled with its norm; shapes as for ``attend``."""
    return compute(_dense, norm, mlp, x)


class Sparse(NamedTuple):
    """What a sparse MLP computes before its routed experts: the modules, each None if the MLP lacks it.

    Attributes:
        router: a router of transformers whose experts weight their outputs.
        shared: the shared experts.
        gate: the linear layer whose sigmoid scales their output.
    """

    router: nn.Module | None
    shared: nn.Module | None
    gate: nn.Module | None


class BeforeExperts(NamedTuple):
    """What a sparse MLP has computed when its routed experts start.

    Attributes:
        read: the input of the MLP, ``[slots, 1, hidden]``.
        shared: the output of shared experts, with the same shape; None without them.
        weights: of the experts of each token, ``[slots, top_k]``; None without a router, and so is ``chosen``.
        chosen: their numbers.
    """

    read: Tensor
    shared: Tensor | None
    weights: Tensor | None
    chosen: Tensor | None


def before_experts(norm: nn.Module, sparse: Sparse, x: Tensor) -> BeforeExperts:
    """The norm, the shared experts and the router of a sparse MLP, compiled; arguments as for ``attend``."""
    return BeforeExperts(*compute(_before_experts, norm, *sparse, x))


def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the compiled version of a function, or the function itself if it could not be compiled."""
    return _compiled(function)(*args, **kwargs)


class _Compiled:
    """A function, compiled until that fails: for want of a compiler, say, or because of too many shapes."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is not None:
            try:
                with torch._dynamo.config.patch(recompile_limit=_SHAPES):
                    return self._compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # nothing was computed yet
                name, cause = self._function.__name__.strip("_"), getattr(error, "inner_exception", error)
                log.warning("decoding with %s uncompiled, which is slower: %s", name, reason_of(cause))
                self._compiled = None
        return self._function(*args, **kwargs)


_compiled = cache(_Compiled)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)


def _attended(norm: nn.Module, attention: nn.Module, x: Tensor, **kwargs: Any) -> Tensor:
    return attention(hidden_states=norm(x), **kwargs)[0]


def _dense(norm: nn.Module, mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp(norm(x))


def _before_experts(
    norm: nn.Module, router: nn.Module | None, shared: nn.Module | None, gate: nn.Module | None, x: Tensor
) -> tuple[Tensor | None, ...]:
    read = norm(x)
    tokens = read.flatten(0, -2)
    output = weights = chosen = None
    if shared is not None:
        output = shared(tokens)
        if gate is not None:
            output = torch.sigmoid(gate(tokens)) * output
        output = output.view_as(read)
    if router is not None:
        with _SortedTopK():
            _, weights, chosen = router(tokens)
    return read, output, weights, chosen


class _SortedTopK(TorchFunctionMode):
    """Inside the block, ``topk`` is the beginning of a sort.

    A compiler for GPUs fuses a sort of few numbers with what stands around it. ``topk`` starts kernels of its own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_sorted_topk if func in (torch.topk, Tensor.topk) else func)(*args, **(kwargs or {}))


def _sorted_topk(x: Tensor, k: int, dim: int = -1, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The highest numbers and their places; without ``largest=False``, which no router uses."""
    values, places = torch.sort(x, dim=dim, descending=True)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)
