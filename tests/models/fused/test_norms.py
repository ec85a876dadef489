"""RMSNorms that torch computes at once are transformers' own up to rounding, and their classes come back."""

from collections.abc import Container
from dataclasses import replace

import pytest
import tiny
import torch
from kernel_device import DEVICE
from representatives import representatives
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, decoder_of, unwired, wire
from fcsd.models.fused import FusedNorm, fuse_norms


def run(model: nn.Module, length: int = 24) -> list[Tensor]:
    """Logits and the gradient of every parameter, of two sequences of ``length`` tokens."""
    model.zero_grad()
    ids = tiny.tokens(length=length)
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


_OTHERS = ("linear_attn", ".o_norm.", ".mamba.norm.", "norm.mlp.")


def _is_plain_norm(name: str, names: Container[str]) -> bool:
    """Most norms of linear attention take a gate, an indexer may have one with a bias, and A.X K2 gates norms."""
    biased = name.replace(".weight", ".bias") in names
    return "norm" in name and not biased and not any(part in name for part in _OTHERS)


@pytest.mark.parametrize("arch", representatives("norm"))
def test_a_model_with_fused_norms_computes_the_same_and_becomes_itself_again(arch):
    model = tiny.model(arch)
    with torch.no_grad():  # a weight of one would not show where it is multiplied
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    classes = [type(module) for module in model.modules()]
    expected = run(model)
    for _ in range(2):
        fuse_norms(model, arch_of(model.config))
        norms = [module for module in decoder_of(model).modules() if isinstance(module, FusedNorm)]
        named = dict(decoder_of(model).named_parameters())
        weights = {id(p) for name, p in named.items() if _is_plain_norm(name, named)}
        assert {id(norm.weight) for norm in norms} == (weights if ARCHS[arch].norm_epsilon else set())
    for fused, own in zip(run(model), expected, strict=True):
        assert (fused - own).norm() <= 2e-6 * own.norm()
    wire(model, unwired())
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(again, own) for again, own in zip(run(model), expected, strict=True))


@pytest.mark.parametrize("arch", ["llama", "gpt_oss", "llama4_text"])  # each rounds in another place
def test_in_bf16_a_fused_norm_errs_no_more_than_transformers(arch):
    generator = torch.Generator().manual_seed(0)
    model = tiny.model(arch, dtype=torch.bfloat16).to(DEVICE)
    norm = model.model.norm
    norm.weight.data.copy_(torch.rand(64, generator=generator) + 0.5)
    x, upstream = (torch.randn(512, 64, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))

    def error() -> list[float]:
        """Relative, of output, input's and weight's gradient."""
        inputs = x.clone().requires_grad_()
        out = norm(inputs)
        found = [out, *torch.autograd.grad(out, (inputs, norm.weight), upstream)]
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    inputs, weight = x.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    out = weight * inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    exact = [out.detach(), *torch.autograd.grad(out, (inputs, weight), upstream.double())]
    own = error()
    fuse_norms(model, arch_of(model.config))
    assert isinstance(norm, FusedNorm)
    assert all(fused <= 1.5 * eager for fused, eager in zip(error(), own, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_that_multiplies_by_one_plus_its_weight_does_so_when_fused(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = Gemma2RMSNorm(64)
    norm.weight.data.copy_(torch.rand(64, generator=generator) * 0.1)
    model = nn.ModuleList([norm, nn.LayerNorm(64)]).to(DEVICE, dtype)
    x = torch.randn(32, 64, generator=generator).to(DEVICE, dtype).requires_grad_()
    expected = norm(x)
    row = replace(ARCHS["llama"], norm_epsilon="eps", norm_offset=1)
    fuse_norms(model, row)
    assert isinstance(norm, FusedNorm) and type(model[1]) is nn.LayerNorm
    found = norm(x)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == dtype
    for own, theirs in zip(*(torch.autograd.grad(y.sum(), (x, norm.weight)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(own, theirs, rtol=tolerance, atol=4 * tolerance)
