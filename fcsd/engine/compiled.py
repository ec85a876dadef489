"""Compiles what a decoding step computes between two reductions: each part of a layer with the norm before it, and with
the sum of the residual stream and the outputs that this norm reads.

``torch.compile`` fuses the many small kernels of a norm, of the rotary embedding and of the activation. A reduction is
never inside of what is compiled, so no compiler can move its start or its wait. All layers of a kind share one compiled
function: the modules are its arguments.

Attention, dense MLPs, shared experts and routers are compiled. Routed experts are not, because the number of rows of
each is known on the device alone.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fcsd.engine.sharded_modules import SplitNorm

# How often one of the functions below may be compiled: once for each batch, degree, and length that attention reads.
_SHAPES = 64


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


def attend(norm: nn.Module, attention: Any, x: Tensor, sums: Sequence[Tensor], **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The residual stream with ``sums``, and the output of an attention, compiled together with its norm.

    Args:
        norm: the norm before the attention.
        attention: transformers' module.
        x: the residual stream ``[slots, 1, hidden]``.
        sums: what is added to it before the norm, each with the shape of ``x``.
        kwargs: what transformers' loop over layers passes to the attention, ``past_key_values`` among it.
    """
    index = attention.layer_idx
    kwargs["past_key_values"] = OneLayer(kwargs["past_key_values"].layers[index])
    if any(isinstance(module, SplitNorm) for module in attention.modules()):  # it reduces, which is not compiled
        x, read = compute(_normed, norm, x, sums)
        return x, attention(hidden_states=read, **kwargs)[0]
    attention.layer_idx = 0
    try:
        return compute(_attended, norm, attention, x, sums, **kwargs)
    finally:
        attention.layer_idx = index


def dense(norm: nn.Module, mlp: nn.Module, x: Tensor, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The stream with ``sums``, and the output of a dense MLP, compiled with its norm; shapes as for ``attend``."""
    return compute(_dense, norm, mlp, x, sums)


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
        x: the residual stream with the sums, ``[slots, 1, hidden]``.
        read: the input of the MLP, with the same shape.
        shared: the output of shared experts, with the same shape; None without them.
        weights: of the experts of each token, ``[slots, top_k]``; None without a router, and so is ``chosen``.
        chosen: their numbers.
    """

    x: Tensor
    read: Tensor
    shared: Tensor | None
    weights: Tensor | None
    chosen: Tensor | None


def before_experts(norm: nn.Module, sparse: Sparse, x: Tensor, sums: Sequence[Tensor]) -> BeforeExperts:
    """The norm, the shared experts and the router of a sparse MLP, compiled; arguments as for ``attend``."""
    return BeforeExperts(*compute(_before_experts, norm, *sparse, x, sums))


def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the compiled version of a function."""
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        return _compiled(function)(*args, **kwargs)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _attended(
    norm: nn.Module, attention: nn.Module, x: Tensor, sums: Sequence[Tensor], **kwargs: Any
) -> tuple[Tensor, Tensor]:
    x, read = _normed(norm, x, sums)
    return x, attention(hidden_states=read, **kwargs)[0]


def _dense(norm: nn.Module, mlp: nn.Module, x: Tensor, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    x, read = _normed(norm, x, sums)
    return x, mlp(read)


def _before_experts(
    norm: nn.Module,
    router: nn.Module | None,
    shared: nn.Module | None,
    gate: nn.Module | None,
    x: Tensor,
    sums: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    x, read = _normed(norm, x, sums)
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
    return x, read, output, weights, chosen


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


def _normed(norm: nn.Module, x: Tensor, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    for value in sums:
        x = x + value
    return x, norm(x)
