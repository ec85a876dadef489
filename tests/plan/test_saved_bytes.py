"""What fused modules keep for the backward pass on the meta device, where plans count it, is what they really keep."""

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fcsd.models.build import arch_of
from fcsd.models.fused.model import fuse_parts
from fcsd.models.fused.norms import fuse_norms
from fcsd.plan.activations import attention, measure_layer

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
TOKENS = 10


def really_saved(run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], hidden: Tensor) -> int:
    """Bytes of what autograd keeps after a forward pass, without the input and the parameters."""
    saved: weakref.WeakSet[Any] = weakref.WeakSet()  # weak, because autograd drops what no gradient needs

    def save(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage())
        return tensor

    entry = hidden.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        total = run(entry).sum()
    found = sum(storage.nbytes() for storage in saved - {part.untyped_storage() for part in (entry, *parameters)})
    del total
    return found


def counted(run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], hidden: Tensor) -> int:
    """The bytes that a plan counts, without those of the sum with which ``measure_layer`` ends."""
    return measure_layer(run, parameters, hidden).kept - hidden.element_size()


def fused_layers(arch: str, device: str) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The layers of a tiny model in bf16 with the attention function of plans, and functions that run them.

    Norms are fused on GPUs only, because elsewhere torch has no kernel whose memory could be compared.
    """
    AttentionInterface.register("fcsd_plan", attention(False, []))
    model = tiny.model(arch, dtype=torch.bfloat16).train().to(device)
    model.set_attn_implementation("fcsd_plan")
    given: list[dict[str, Any]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        model.model(input_ids=tiny.tokens(1, TOKENS).to(device), use_cache=False)
    row = arch_of(model.config)
    fuse_parts(model, row, True)
    fuse_norms(model, row, DEVICE == "cuda")
    return [(layer, partial(layer, **kwargs)) for layer, kwargs in zip(model.model.layers, given, strict=True)]


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_a_fused_layer_keeps_on_the_meta_device_what_autograd_saves(arch: str) -> None:
    hidden = torch.randn(1, TOKENS, 64, dtype=torch.bfloat16)
    kept: list[list[int]] = []
    for device, count in ((DEVICE, really_saved), ("meta", counted)):
        layers = fused_layers(arch, device)
        kept.append([count(run, list(layer.parameters()), hidden.to(device)) for layer, run in layers])
    assert kept[0] == kept[1]
    assert all(kept[0])
