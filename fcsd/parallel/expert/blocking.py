"""Computes a decoder layer with divided experts and awaits every collective where it starts (FarSkip §2.1).

This is the reference for every schedule that awaits later, and it is what ``overlap: off`` runs.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.norms import fuse_norms
from fcsd.models.wiring import Blocks, Parts, Wiring, wire_layers
from fcsd.parallel.expert.dispatcher import MakeDispatcher, Wire
from fcsd.parallel.expert.flat import FlatDispatcher
from fcsd.parallel.expert.lookup import expert_block


def blocking_parts(
    blocks: Blocks, layer: Any, fused: bool = False, dispatcher: MakeDispatcher = FlatDispatcher
) -> Parts:
    """The parts of a decoder layer. A layer whose experts are not divided uses transformers' own MLP.

    Args:
        blocks: the names of the layer's children.
        layer: transformers' decoder layer.
        fused: whether rows are moved by Triton kernels; see ``Wire``.
        dispatcher: makes the dispatcher, which sends rows to the experts and back.
    """
    mlp = layer.get_submodule(blocks.mlp)

    def attn(x: Tensor, **kwargs: Any) -> Tensor:
        return layer.self_attn(hidden_states=x, **kwargs)[0]

    block = expert_block(mlp)
    if block is None:
        return Parts(attn, mlp, None)

    def routed(x: Tensor) -> Tensor:
        one = dispatcher(block, layer.self_attn.layer_idx, x, Wire(mode="off", fused=fused))
        one.advance(None)
        one.run_experts(None)
        return one.land()

    return Parts(attn, block.shared, routed)


def wire_parallel(
    model: PreTrainedModel, wiring: Wiring, fused: bool = False, dispatcher: MakeDispatcher = FlatDispatcher
) -> None:
    """Wire a model whose experts are divided. Every layer is taken apart, so that all layers use the same parts.

    Args:
        fused: whether one CUDA kernel computes each RMSNorm and each move of rows between tokens and experts. The
            results then differ in the last digit.
        dispatcher: makes the dispatcher, which sends rows to the experts and back.
    """
    arch = arch_of(model.config)
    parts = partial(blocking_parts, arch.blocks, fused=fused, dispatcher=dispatcher)
    wire_layers(decoder_layers(model), wiring, parts, every=True)
    fuse_norms(model, arch, fused)
