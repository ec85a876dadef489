"""Corrects the weights of a rewired model by least squares on a calibration text, before any training.

A rewired sub-block reads a stream that lacks what is in flight, and the streams of later layers drift away from those
of the original. For each read, in the order of the model, ``solve_start`` finds the map from the normalised input of
the rewired model to that of the original with the smallest squared error over the tokens of the text. It folds the map
into weights that exist already, so the architecture stays the same. All earlier reads have been corrected by then.

``norms`` uses a diagonal map, and multiplies the gain of the norm by it. ``linear`` uses a full matrix, and folds it
into every projection of the normalised input: queries, keys and values, or gates, up-projections and the router. The
final norm gets a diagonal map in both cases, because the output head may be tied to the embedding.

With ``S`` and ``T``, the inputs of the rewired model and of the original as ``[tokens, hidden]``, the map is the ridge
solution ``(S'S + r I)^-1 (S'T + r I)``, which is drawn towards the identity. ``r`` is ``RIDGE`` times the mean of the
diagonal of ``S'S``. This file is not part of exported checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .build import arch_of, decoder_of
from .wiring import Blocks, WiredLayer

RIDGE = 1e-2
# The modules that multiply a normalised input in all supported architectures.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj")
STACKED = "gate_up_proj"  # those of all experts in one tensor of three dimensions

Batch = dict[str, Tensor]
Forward = Callable[[PreTrainedModel, Batch], Any]


@dataclass(frozen=True)
class Read:
    """A read of the residual stream.

    Attributes:
        norm: the norm that the stream passes through first.
        readers: the weights that multiply the normalised input, each with whether its last dimensions are
            ``[hidden, out]`` instead of ``[out, hidden]``.
    """

    norm: Any
    readers: tuple[tuple[nn.Parameter, bool], ...] = ()


class _ReachedError(Exception):
    """A forward pass has computed what it was started for."""


@torch.no_grad()
def solve_start(
    model: PreTrainedModel,
    original: PreTrainedModel,
    batches: Sequence[tuple[Batch, Tensor]],
    how: str,
    forward: Forward,
    sum_over_processes: Callable[[Tensor], Any] = lambda _: None,
) -> None:
    """Correct the weights of a rewired model in place.

    For each read from the first rewired layer on, both models compute the text up to this read. If all layers are
    rewired, this takes about as many whole forward passes of each model as it has layers. A read whose input is the
    same in both models, to the last bit, changes nothing, so a model with the standard wiring stays as it is.

    Args:
        model: the rewired model in eval mode, with the weights of ``original``.
        original: the same model with its standard wiring, in eval mode.
        batches: the text: what ``forward`` takes, and which positions count, ``[batch, seq]`` bool.
        how: ``norms`` or ``linear``.
        forward: runs a model on a batch.
        sum_over_processes: sums a tensor over all processes in place; it is needed if each has its own batches.
    """
    wired = [number for number, layer in enumerate(decoder_of(model).layers) if isinstance(layer, WiredLayer)]
    if not wired:
        return
    first = 2 * wired[0]  # two reads in each layer; those of earlier layers are the original's
    for read, reference in zip(reads_of(model)[first:], reads_of(original)[first:], strict=True):
        full = how == "linear" and bool(read.readers)
        width = len(read.norm.weight)
        shape = (2, width, width) if full else (2, width)
        moments = torch.zeros(shape, dtype=torch.float64, device=model.device)  # S'S and S'T, or their diagonals
        for batch, counts in batches:
            given = _normalised(model, read.norm, batch, forward)[counts].double()
            wanted = _normalised(original, reference.norm, batch, forward)[counts].double()
            for moment, other in zip(moments, (given, wanted), strict=True):
                moment += given.T @ other if full else (given * other).sum(0)
        sum_over_processes(moments)
        squares, products = moments
        if torch.equal(squares, products):
            continue
        if full:
            _fold(read, ridge_map(squares, products))
        else:
            ridge = RIDGE * squares.mean()
            read.norm.weight.mul_((products + ridge) / (squares + ridge))


def ridge_map(squares: Tensor, products: Tensor) -> Tensor:
    """The matrix ``[hidden, hidden]`` that maps rows of S to rows of T; see the head of this file.

    Args:
        squares: ``S'S``, float64.
        products: ``S'T``, float64.
    """
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
    return torch.linalg.solve(squares + ridge, products + ridge)


def _fold(read: Read, change: Tensor) -> None:
    """Let the readers see their input multiplied by ``change`` from the right."""
    for weight, transposed in read.readers:
        exact = weight.double()
        weight.copy_(change @ exact if transposed else exact @ change.T)


def reads_of(model: PreTrainedModel) -> list[Read]:
    """All reads of the residual stream, in the order in which the model computes them."""
    blocks, decoder = arch_of(model.config).blocks, decoder_of(model)
    found = []
    for layer in decoder.layers:
        mlp = layer.get_submodule(blocks.mlp)
        found.append(Read(layer.input_layernorm, _readers(layer.self_attn, blocks)))
        found.append(Read(layer.post_attention_layernorm, _readers(mlp, blocks)))
    return [*found, Read(decoder.norm)]


def _readers(block: nn.Module, blocks: Blocks) -> tuple[tuple[nn.Parameter, bool], ...]:
    """The weights of an attention or an MLP that multiply its input."""
    found = []
    for name, parameter in block.named_parameters():
        owner, _, kind = name.rpartition(".")
        if kind == STACKED:
            experts = block.get_submodule(owner)
            found.append((parameter, blocks.prescaled or getattr(experts, "is_transposed", False)))
        elif kind == "weight" and (owner in (blocks.router, blocks.shared_gate) or owner.split(".")[-1] in PROJECTIONS):
            found.append((parameter, False))
    return tuple(found)


def _normalised(model: PreTrainedModel, norm: nn.Module, batch: Batch, forward: Forward) -> Tensor:
    """The output ``[batch, seq, hidden]`` of a norm; the rest of the forward pass is not computed."""
    found: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        found.append(output)
        raise _ReachedError

    handle = norm.register_forward_hook(keep)
    try:
        forward(model, batch)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return found[0]
