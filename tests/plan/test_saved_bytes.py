"""What fused modules keep on the meta device, where plans count it, is what they really keep for the backward pass."""

import weakref
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
from kernel_device import DEVICE
from representatives import representatives
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, decoder_layers
from fcsd.models.fused import FusedExperts, FusedLatentAttention, FusedMLP, FusedRotary, fuse_norms, fuse_parts
from fcsd.plan.activations import MetaExperts, attention, measure_layer
from fcsd.plan.model import own_copies

TOKENS = 4  # the interpreter runs one program after the other for each token
REPEATS_ANGLES = {"ernie4_5", "ernie4_5_moe", "glm"}
# Their masks stand for the keys that they choose.
MASKED = {"deepseek_v32", "glm_moe_dsa"}
# An architecture that has them, for each of the fused modules beside norms.
EXAMPLES = {FusedExperts: "mixtral", FusedLatentAttention: "deepseek_v2", FusedMLP: "llama", FusedRotary: "qwen3"}


def really_saved(run: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], hidden: Tensor) -> int:
    """Bytes of what autograd keeps after a forward pass, without the input and the ``parameters``."""
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


def fused_layers(arch: str, device: str) -> list[tuple[list[Any], nn.Module, Callable[[Tensor], Tensor]]]:
    """For each layer of a tiny model in bf16: the tensors that it does not make, the layer, and what runs it.

    The attention function is that of plans. The tensors are parameters, buffers, and what the model gives all layers.

    Norms are fused on GPUs only, because elsewhere torch has no kernel whose memory could be compared.
    """
    AttentionInterface.register("fcsd_plan", attention(False, []))
    model = tiny.model(arch, dtype=torch.bfloat16).train().to(device)
    model.set_attn_implementation("fcsd_plan")
    given: list[tuple[list[Any], dict[str, Any]]] = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(([*args[1:]], own_copies(kwargs))), with_kwargs=True
        )
    with torch.no_grad():
        model.model(input_ids=tiny.tokens(1, TOKENS).to(device), use_cache=False)
    row = arch_of(model.config)
    fuse_parts(model, row, True)
    fuse_norms(model, row, DEVICE == "cuda")
    # Among them are the keys and values that earlier layers have put into a table.
    tables = [
        [*table.values()] for _, kwargs in given for table in kwargs.values() if isinstance(table, MutableMapping)
    ]
    outer = [x for x in tree_leaves([given, tables]) if isinstance(x, Tensor)]
    return [
        (
            [*layer.parameters(), *layer.buffers(), *outer],
            layer,
            lambda hidden, layer=layer, args=args, kwargs=kwargs: layer(hidden, *args, **kwargs),
        )
        for layer, (args, kwargs) in zip(decoder_layers(model), given, strict=True)
    ]


@pytest.mark.parametrize(
    "arch", representatives("norm", "mlp", "moe", "rotary", of=[arch for arch in tiny.CONFIGS if arch not in MASKED])
)
def test_a_fused_layer_keeps_on_the_meta_device_what_autograd_saves(arch: str) -> None:
    hidden = torch.randn(1, TOKENS, 64, dtype=torch.bfloat16)
    kept: list[list[int]] = []
    for device, count in ((DEVICE, really_saved), ("meta", counted)):
        with MetaExperts() if device == "meta" else nullcontext():
            layers = fused_layers(arch, device)
            kept.append([count(run, others, hidden.to(device)) for others, _, run in layers])
    if DEVICE == "cpu":  # keeps the mean and the scale of a row in bf16, and a GPU in fp32
        statistics = [sum(isinstance(part, nn.LayerNorm) for part in layer.modules()) for _, layer, _ in layers]
        kept[0] = [count + 2 * 2 * TOKENS * norms for count, norms in zip(kept[0], statistics, strict=True)]
    # In linear attention the decays of a chunk, of which only a view is read, are not seen on the meta device.
    unseen = 0.005 if ARCHS[arch].blocks.linear else 0
    for really, found in zip(*kept, strict=True):
        assert really * (1 - unseen) <= found
        assert found <= really
    modules = [module for _, layer, _ in layers for module in layer.modules()]
    for fused, example in EXAMPLES.items():
        assert arch != example or any(isinstance(module, fused) for module in modules)


def test_a_fused_norm_keeps_on_the_meta_device_what_the_backward_pass_of_torchs_kernel_takes() -> None:
    """The operator of the kernel returns the scales ``rstd`` too, and that of its gradients takes them."""
    norm = tiny.model("llama", dtype=torch.bfloat16).model.norm
    x = torch.randn(2, TOKENS, 64, dtype=torch.bfloat16)
    _, scales = torch.ops.aten._fused_rms_norm(x, [64], norm.weight, 1e-6)
    taken = torch.ops.aten._fused_rms_norm_backward.default._schema.arguments
    assert {each.name for each in taken if "Tensor" in str(each.type)} == {"grad_out", "input", "rstd", "weight"}
    norm.to("meta")
    fuse_norms(norm, arch_of(tiny.config("llama")))
    assert counted(norm, list(norm.parameters()), x.to("meta")) == scales.untyped_storage().nbytes()
