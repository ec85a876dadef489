"""Attention whose heads kernels rotate is transformers' own up to rounding, and its classes come back."""

import pytest
import tiny
import torch
from test_norms import DEVICE, run

from fcsd.kernels import rotary as kernel
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, unwired, wire
from fcsd.models.rotary import FusedRotary, fuse_rotary


@pytest.mark.parametrize("arch", tiny.CONFIGS)
def test_a_model_with_fused_rotations_computes_the_same_and_becomes_itself_again(arch: str) -> None:
    model = tiny.model(arch)
    classes, expected = [type(module) for module in model.modules()], run(model)
    model.to(DEVICE)
    for _ in range(2):
        fuse_rotary(model, arch_of(model.config))
        fused = [module for module in model.modules() if isinstance(module, FusedRotary)]
        assert len(fused) == (model.config.get_text_config().num_hidden_layers if ARCHS[arch].rotates_halves else 0)
    if DEVICE == "cpu":
        for found, own in zip(run(model), expected, strict=True):
            assert (found - own).norm() <= 1e-5 * own.norm()
    wire(model.to("cpu"), unwired())
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(again, own) for again, own in zip(run(model), expected, strict=True))


def test_the_kernel_rotates_and_a_compiler_sees_the_code_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("glm4_moe").to(DEVICE)
    calls: list[int] = []
    monkeypatch.setattr(
        kernel, "rotate", lambda x, cos, sin: calls.append(x.shape[1]) or kernel.rotate_reference(x, cos, sin)
    )
    fuse_rotary(model, arch_of(model.config))
    ids = tiny.tokens().to(DEVICE)
    model(ids)
    config = model.config
    assert calls == [config.num_attention_heads, config.num_key_value_heads] * config.num_hidden_layers
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model(ids)
    assert len(calls) == 2 * config.num_hidden_layers
