"""Computes a decoder layer with divided experts and awaits every collective where it starts (FarSkip §2.1).

This is the reference for every schedule that awaits later, and it is what ``overlap: off`` runs.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.fused import fuse_norms, fuse_rotary
from fcsd.models.wiring import Blocks, Parts, Wiring, mix, mixer, wire_layers
from fcsd.parallel.expert.autoep import expert_block
from fcsd.parallel.expert.dispatcher import Dispatcher, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.quantised import Quantiser
from fcsd.parallel.transports.transport import Traffic


def blocking_parts(blocks: Blocks, layer: Any, transfer: Transfer, dispatcher: Dispatcher) -> Parts:
    """The parts of a decoder layer. A layer whose experts are not divided uses transformers' own MLP.

    Args:
        layer: transformers' decoder layer.
        transfer: how rows travel; its mode is ``off``.
    """
    mlp, attention = layer.get_submodule(blocks.mlp), mixer(blocks, layer)
    attn = partial(mix, attention)
    block = expert_block(mlp)
    if block is None:
        return Parts(attn, mlp, None)

    def routed(x: Tensor) -> Tensor:
        packed = dispatcher(block, attention.layer_idx, x, transfer)
        return packed.dispatch(None).combine(None).land()

    return Parts(attn, block.shared, routed)


def wire_parallel(
    model: PreTrainedModel,
    wiring: Wiring,
    fused: bool = False,
    dispatcher: Dispatcher = flat,
    quantiser: Quantiser | None = None,
    traffic: Traffic | None = None,
) -> None:
    """Wire a model whose experts are divided. Every layer is taken apart, so that all layers use the same parts.

    Args:
        fused: whether one CUDA kernel computes each RMSNorm, each rotation of queries or keys, and each move of rows
            between tokens and experts. The results then differ in the last digit.
        quantiser: rounds the rows to the formats of quantised communication; None sends them as they are.
        traffic: counts the bytes that are sent; None does not count.
    """
    arch = arch_of(model.config)
    transfer = Transfer(mode="off", fused=fused, quantiser=quantiser, traffic=traffic)
    parts = partial(blocking_parts, arch.blocks, transfer=transfer, dispatcher=dispatcher)
    wire_layers(decoder_layers(model), wiring, arch.blocks, parts, every=True)
    fuse_norms(model, arch, fused)
    fuse_rotary(model, arch, fused)
