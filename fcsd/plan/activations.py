"""Measures on the meta device how many bytes a decoder layer keeps for its backward pass.

A layer of the real model runs forward and backward on tensors that have shapes and no data, while every storage that is
allocated or freed is counted. The figure therefore includes whatever an architecture's code saves: fp32 copies in
norms, rotary embeddings, latents of MLA. This works in the same way for all architectures, and for the fused modules of
``fcsd.models.fused``, whose kernels do not start on the meta device but allocate and keep what they do on a GPU. Two
parts of the layer are replaced by stand-ins:

- The stand-in for attention keeps what the kernels of sdpa and of packed attention keep: q, k, v, the output and an
  fp32 log-sum-exp per row. Where packed rows need a mask, sdpa keeps a bias ``[batch, 1, seq, seq]`` per layer, and
  transformers repeats keys and values to all heads, because no fused kernel takes a mask and grouped heads together.
- The stand-in for routed experts under expert parallelism has the steps of ``fcsd.parallel.expert.block``. The number
  of its rows, ``tokens * top_k * imbalance``, is known beforehand.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fcsd.kernels.gated import gated_silu
from fcsd.models.adapters.lora import adapted_linear

_ALIGNED = 8  # values of 2 bytes in the 16 bytes that torch requires


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer allocates in a forward and backward pass.

    Attributes:
        kept: bytes that stay allocated between the layer's forward and backward pass. Its input and its parameters are
            not counted.
        forward: the largest number of bytes allocated at any time of a forward pass that keeps nothing. The layer's
            input is not counted.
        backward: the largest number of bytes allocated in addition to ``kept`` at any time of the backward pass. The
            gradients of parameters are not counted.
    """

    kept: int
    forward: int
    backward: int

    def times(self, rows: int) -> "LayerBytes":
        """The bytes of a micro-batch of ``rows`` times as many rows: every activation grows with the rows."""
        return LayerBytes(self.kept * rows, self.forward * rows, self.backward * rows)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are made inside it: those that exist now (``live``) and at most (``peak``)."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def ignore(self, *tensors: Tensor) -> None:
        """Excludes the storages of ``tensors``, which existed before, from the count."""
        self._known.update(tensor.untyped_storage() for tensor in tensors)

    def _add(self, storage: Any) -> None:
        if storage not in self._known:
            size = storage.nbytes()
            self._known.add(storage)
            self.live += size
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


def measure_layer(run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], hidden: Tensor) -> LayerBytes:
    """Runs a layer forward and backward, and counts its bytes.

    Args:
        run: the layer; it takes and returns a tensor ``[batch, seq, hidden]``.
        parameters: all parameters that ``run`` uses.
        hidden: the layer's input ``[batch, seq, hidden]``, on the meta device.
    """
    with torch.no_grad(), LiveBytes() as idle:
        idle.ignore(hidden, *parameters)
        run(hidden)
    entry = hidden.detach().requires_grad_()
    with LiveBytes() as seen:
        seen.ignore(entry, *parameters)
        # The sum stands for the layers that follow. It frees the output, of which the next layer's norm makes a copy.
        end = run(entry).sum()
        kept = seen.peak = seen.live
        end.backward()
        own = sum(p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None)
    for parameter in parameters:
        parameter.grad = None
    # The gradient of a sum takes no memory, but the gradient that comes from a real next layer does.
    incoming = hidden.untyped_storage().nbytes()
    return LayerBytes(kept=kept, forward=idle.peak, backward=max(0, seen.peak - kept - own) + incoming)


class MetaExperts(TorchFunctionMode):
    """While this is active, routed experts run on the meta device where they would not, and keep the bytes of a GPU.

    torch refuses grouped products whose rows are not a multiple of 16 bytes on GPUs and on the meta device, although
    nothing is computed there. It computes them on CPUs, where such models are trained in tests. The product with one
    expert's weights keeps and returns the same bytes.

    A family whose experts are computed one after the other asks which of them have rows, and which rows those are. No
    shape says so. Here all have some, and as many as the others, so that the copies of their weights that autograd
    keeps are all counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._experts = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = getattr(torch, "_grouped_mm", None)
        if func is grouped and any(size % _ALIGNED for size in args[1].shape[1:]):
            rows, weights = args[0], args[1]  # [rows, in] and [experts, in, out]
            return rows @ weights[0]
        if func is Tensor.nonzero and args[0].is_meta:
            self._experts = args[0].numel() - 1  # the last number stands for no expert
            return torch.arange(self._experts)[:, None]
        if func is torch.where and len(args) == 1 and args[0].is_meta:
            rows = -(-args[0].numel() // self._experts)
            return tuple(torch.empty(rows, dtype=torch.int64, device="meta") for _ in args[0].shape)
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps; ``[batch, heads, seq, dim] -> [batch, seq, heads, dim_v]``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, heads, seq, _ = query.shape
        output = query.new_empty(batch, seq, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, seq, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        accumulated = torch.empty_like(query, dtype=torch.float32)  # kernels sum the query's gradient in fp32
        gradients: Any = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del accumulated
        return (*gradients, None)


def attention(masked: bool, widths: list[int]) -> Callable[..., tuple[Tensor, None]]:
    """Makes the function that replaces attention, for transformers' ``AttentionInterface``.

    Args:
        masked: whether attention runs with a mask, which packed rows need when packed attention is off.
        widths: a list to which each call appends its layer's ``heads * (d_k + d_v)``.
    """

    def run(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        widths.append(query.shape[1] * (query.shape[-1] + value.shape[-1]))
        bias: Tensor | None = None
        repeats = query.shape[1] // key.shape[1]
        if masked:
            bias = query.new_empty(len(query), 1, query.shape[2], query.shape[2])
            if repeats > 1:
                key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return _Attention.apply(query, key, value, bias), None  # type: ignore[return-value]

    return run


class _Rows(torch.autograd.Function):
    """An all-to-all or a permutation: it returns other rows of the same width, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int) -> Tensor:
        ctx.count = len(rows)
        return rows.new_empty(count, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.new_empty(ctx.count, gradient.shape[1]), None


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter, in the steps of a run, without ``peft``, which need not be installed."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        how: Any = {"bias": False, "dtype": base.weight.dtype, "device": "meta"}
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, rank, **how), nn.Linear(rank, base.out_features, **how)

    @property
    def weight(self) -> Tensor:
        """The frozen weight, at which transformers' code may look."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return adapted_linear(x, self.base.weight, self.base.bias, self.down.weight, self.up.weight, 2.0)


class RoutedExperts(nn.Module):
    """The routed experts of an expert-parallel rank, with the steps of ``fcsd.parallel.expert.block``, to count bytes.

    Args:
        hidden: width of the residual stream.
        inner: intermediate width of one expert.
        experts: routed experts of the layer.
        top_k: experts that a token is routed to.
        imbalance: rows that the fullest rank receives, divided by the mean over the ranks.
        prescaled: whether the scores are applied to the experts' inputs (as in llama4) instead of their outputs.
    """

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, imbalance: float, prescaled: bool) -> None:
        super().__init__()
        self.top_k, self.imbalance, self.prescaled = top_k, imbalance, prescaled
        self.gate, self.w1, self.w3, self.w2 = (
            nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
            for shape in ((experts, hidden), (inner, hidden), (inner, hidden), (hidden, inner))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Takes the stream ``x [batch, seq, hidden]`` and returns a tensor of the same shape."""
        flat = x.reshape(-1, x.shape[-1])
        scores = F.linear(flat, self.gate).float().softmax(-1).topk(self.top_k, dim=-1).values
        order = torch.empty(len(flat) * self.top_k, dtype=torch.int64, device="meta")
        rows = flat[order // self.top_k]
        if self.prescaled:
            rows = (rows.float() * scores.reshape(-1, 1)[order].float()).to(rows.dtype)
        received = _Rows.apply(rows, int(len(rows) * self.imbalance))
        permuted: Any = _Rows.apply(received, len(received))  # type: ignore[arg-type]
        del rows, received
        inner = gated_silu(F.linear(permuted, self.w1), F.linear(permuted, self.w3))
        outputs = _Rows.apply(F.linear(inner, self.w2), len(inner))
        returned: Any = _Rows.apply(outputs, len(order))
        placed = torch.zeros_like(returned)
        placed[order] = returned
        placed = placed.reshape(len(flat), self.top_k, -1)
        if not self.prescaled:
            placed = placed * scores.reshape(-1, self.top_k, 1)
        return placed.sum(1).to(x.dtype).reshape(x.shape)
