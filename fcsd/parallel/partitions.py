"""Weights that ZeRO-3 divides among all ranks: how they are divided, what they are as a whole, and how they are read.

DeepSpeed leaves an empty tensor in place of a weight that it has divided. Its hooks gather the weights of a module for
the passes of that module. Whoever reads a weight elsewhere must gather it with ``gathered``.

DeepSpeed's hooks are on every module, and they are slow on the host: those of the dozen modules of a decoder layer take
the host longer than the launch of the layer's own kernels. ``gather_by_layer`` leaves one pair of hooks on each layer,
which gather all its weights at once.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

KEPT_WHOLE = 100_000  # weights of at most this many elements stay whole; DeepSpeed's default
GROUP = 2**28  # parameters of a group of the optimizer, which ZeRO copies in its step, unless one tensor has more
BUCKET = 500_000_000  # gradients that are reduced at once, unless a layer is smaller; DeepSpeed's default
LIVE = 1_000_000_000  # weights that are whole at a time, unless two layers are larger; DeepSpeed's default


def partition(weights: Sequence[nn.Parameter]) -> None:
    """Sends the values of rank 0 to all ranks, each of which keeps its part. All ranks call this together."""
    from deepspeed.runtime.zero import Init

    made = Init(module=nn.ParameterList(weights), mem_efficient_linear=False)
    made.allgather_sequential = True  # each weight is received where it stays, and not copied out of a common buffer


def keep_no_weights() -> None:
    """Replaces torch's linear function by DeepSpeed's, which keeps no gathered weight for the backward pass.

    The backward pass gathers it again. Where layers are recomputed, their weights are whole from then on. torch's own
    function is faster on the host, and keeps nothing else there.
    """
    from deepspeed.runtime.zero import Init

    Init(module=nn.ParameterList(), mem_efficient_linear=True)


def ahead_of_layers(layers: Iterable[nn.Module], beside: int = 0) -> dict[str, int]:
    """DeepSpeed's settings with which the weights of one layer are gathered while the layer before it is computed.

    The defaults gather ahead a part of a layer as wide as Llama-3 8B's, and the layer waits for the rest. A layer is
    taken without its small weights, which DeepSpeed keeps whole. Gradients are sent layer by layer, too, so that few of
    them wait at the end of the backward pass.

    Args:
        beside: elements of a weight outside of the layers that is whole while the first ones are gathered. Without room
            for it a part of a layer would be gathered ahead, and then a part of each layer behind it.
    """
    sizes = [[whole_shape(weight).numel() for weight in layer.parameters()] for layer in layers]
    largest = max(KEPT_WHOLE, *(sum(size for size in layer if size > KEPT_WHOLE) for layer in sizes))
    return {
        "reduce_bucket_size": min(BUCKET, largest),
        "stage3_param_persistence_threshold": KEPT_WHOLE,
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": max(LIVE, 2 * largest + beside),
    }


def gather_by_layer(engine: Any, layers: Iterable[nn.Module]) -> None:
    """Replaces DeepSpeed's hooks on the modules inside of each layer by one pair on the layer, for all its weights.

    DeepSpeed calls such a layer a leaf. If it knew of them from the start, it would also reduce the gradients of a leaf
    by a hook that PyTorch runs too early where a layer's streams are in a tuple. The hooks are therefore replaced when
    the engine is built: every gradient is reduced by itself, when it exists.

    Args:
        engine: an engine of ZeRO stage 3, with or without an optimizer.
        layers: modules whose forward pass alone reads their weights.
    """
    from deepspeed.utils import set_z3_leaf_module

    hooks = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    hooks._remove_module_hooks()
    for layer in layers:
        set_z3_leaf_module(layer, True)
    hooks.setup_zero_stage3_hooks()


def is_partitioned(weight: Tensor) -> bool:
    """Whether ZeRO-3 has divided a weight."""
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight, which may be divided."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def gathered(weight: Tensor) -> AbstractContextManager[Any]:
    """A block in which a weight is whole; all ranks enter it together. An alias that is made in it stays whole."""
    if not is_partitioned(weight):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(weight)


def changed(weights: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """A block in which weights are whole, and after which every rank has its part of what rank 0 has made of them."""
    if not any(map(is_partitioned, weights)):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(weights, modifier_rank=0)
