"""The exchange of tokens under data-parallel attention with expert parallelism: gather and scatter travel in flight.

Every rank has tokens of its own, and some of the experts of all ranks. vLLM gathers the tokens of all ranks before the
experts, and sums and scatters the outputs behind them, and waits for both. Here the gather travels while the shared
experts are computed, and the scatter until the read that needs its sum, under the next attention. The function is the
same: what a rank gathers is what vLLM gathers, and its own kernels compute the experts on all tokens. The router reads
gathered tokens as well, so its small product is computed on every rank.

The collectives are those of torch.distributed on vLLM's own data-parallel group, so one code runs over gloo and NCCL.
Two operators carry them through torch.compile: ``fcsd::gather_start(x, overlap_from) -> token`` and
``fcsd::experts(x, token, own, after, layer, overlap_from) -> y``. ``y`` is complete after ``fcsd::reduce_wait``. Ranks
have different numbers of tokens, which no compiler knows. The gathered tokens therefore stay between the two operators,
and ``token`` stands for them. ``gather_start`` declares that it writes ``x``: no compiler moves what reads ``x``, and
covers the gather, before it.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fcsd.serve.vllm.reduction import OVERLAP_FROM, Sum, waits, way_of


@dataclass(frozen=True)
class Exchange:
    """The exchange of the tokens of one layer.

    Attributes:
        layer: the name under which vLLM's context of a step has the layer's MoE block without its shared experts.
        overlap_from: see ``reduction.Settings``.
    """

    layer: str
    overlap_from: int = OVERLAP_FROM

    def gather(self, x: Tensor) -> Tensor:
        """Start to gather ``x``, ``[tokens, hidden]``. Returns what stands for the tokens of all ranks."""
        return torch.ops.fcsd.gather_start(x, self.overlap_from)

    def experts(self, x: Tensor, token: Tensor, own: Tensor | None, newest: Tensor) -> Sum:
        """Compute this rank's experts on all tokens, and start to sum their outputs and to scatter the sums.

        Args:
            x: the tokens of this rank, ``[tokens, hidden]``.
            token: what ``gather`` returned for them.
            own: what is added to the sum of this rank's tokens, ``[tokens, hidden]``; None if nothing is.
            newest: the tensor that was computed last, behind which the experts stay.

        Returns:
            The sum for this rank's tokens. It may be in flight.
        """
        return Sum(torch.ops.fcsd.experts(x, token, own, newest, self.layer, self.overlap_from), x)


@dataclass(frozen=True)
class _Step:
    """One step of the data-parallel group: torch's group, this process's rank in it, and the tokens of each rank."""

    group: Any
    rank: int
    tokens: list[int]

    @property
    def even(self) -> bool:
        return min(self.tokens) == max(self.tokens)


def _step() -> _Step:
    from vllm.distributed.parallel_state import get_dp_group  # pyright: ignore[reportMissingImports]
    from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

    group, tokens = get_dp_group(), get_forward_context().dp_metadata.num_tokens_across_dp_cpu
    return _Step(group.device_group, group.rank_in_group, tokens.tolist())


def _travels(x: Tensor, overlap_from: int) -> bool:
    """Whether an exchange of ``x``, ``[tokens, hidden]``, is in flight behind its operator; over gloo it can be."""
    return len(x) >= overlap_from if x.device.type == "cpu" else way_of(x, "auto", overlap_from).travels


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else pad(x, (0, 0, 0, rows - len(x)))


def _gather_start(x: Tensor, overlap_from: int) -> Tensor:
    step = _step()
    mine = _padded(x, max(step.tokens)).contiguous()
    blocks = x.new_empty(len(step.tokens), *mine.shape)
    work = dist.all_gather_into_tensor(blocks.flatten(0, 1), mine, group=step.group, async_op=True)
    assert work is not None, "this process is in the group"
    if not _travels(x, overlap_from):
        work.wait()
    token = x.new_empty(1)
    waits()[token.data_ptr()] = partial(_gathered, work, mine, blocks, step)
    return token


def _gathered(work: dist.Work, mine: Tensor, blocks: Tensor, step: _Step) -> Tensor:
    """The tokens of all ranks, ``[all tokens, hidden]``; ``mine`` had to stay until now."""
    work.wait()
    if step.even:
        return blocks.flatten(0, 1)
    return torch.cat([block[:tokens] for block, tokens in zip(blocks, step.tokens, strict=True)])


def _experts(x: Tensor, token: Tensor, own: Tensor | None, after: Tensor, layer: str, overlap_from: int) -> Tensor:
    from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

    step, gathered = _step(), waits().pop(token.data_ptr())
    out = get_forward_context().no_compile_layers[layer](gathered())
    if len(out) != sum(step.tokens):
        raise RuntimeError("vLLM chose a kernel for experts that scatters its output itself, before fcsd does")
    parts = list(out.split(step.tokens))
    if own is not None:
        parts[step.rank] += own
    rows = max(step.tokens)
    blocks = out.contiguous() if step.even else torch.cat([_padded(part, rows) for part in parts])
    y = x.new_empty(rows, x.shape[1])
    work = dist.reduce_scatter_tensor(y, blocks, group=step.group, async_op=True)
    assert work is not None, "this process is in the group"
    if _travels(x, overlap_from):
        waits()[y.data_ptr()] = partial(_scattered, work, blocks)
    else:
        work.wait()
    return y[: len(x)]


def _scattered(work: dist.Work, blocks: Tensor) -> None:
    """Wait for a scatter; ``blocks``, which it sends, had to stay until now."""
    work.wait()


@cache
def define_operators() -> torch.library.Library:
    """Define the operators. The library that is returned keeps them alive."""
    library = torch.library.Library("fcsd", "FRAGMENT")
    tags = (torch.Tag.needs_fixed_stride_order,)
    library.define("gather_start(Tensor(a!) x, int overlap_from) -> Tensor", tags=tags)
    given = "Tensor x, Tensor token, Tensor? own, Tensor after, str layer, int overlap_from"
    library.define(f"experts({given}) -> Tensor", tags=tags)
    for device in ("CPU", "CUDA"):
        library.impl("gather_start", _gather_start, device)
        library.impl("experts", _experts, device)
    library._register_fake("gather_start", lambda x, overlap_from: x.new_empty(1))
    library._register_fake("experts", lambda x, token, own, after, layer, overlap_from: torch.empty_like(x))
    return library
