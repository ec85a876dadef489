"""Attention whose heads kernels rotate is transformers' own up to rounding, and its classes come back."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from kernel_device import DEVICE
from representatives import representatives
from test_norms import run
from torch import Tensor

from fcsd.kernels import rotary as kernel
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, decoder_layers, unwired, wire
from fcsd.models.fused import FusedLatentAttention, FusedRotary, fuse_rotary
from fcsd.models.wiring import is_linear, mixer

LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_k25"}
CHOOSES = {"deepseek_v32", "glm_moe_dsa"}  # which keys it reads
SCALES = {"mistral4"}  # latent queries by their positions; the function that rotates halves is not called
LENGTH = 2  # the interpreter runs one program after the other for each token; the second one is rotated


@pytest.mark.parametrize("arch", representatives("rotary"))
def test_a_model_with_fused_rotations_computes_the_same_and_becomes_itself_again(arch: str) -> None:
    model = tiny.model(arch)
    classes, expected = [type(module) for module in model.modules()], run(model, LENGTH)
    model.to(DEVICE)
    for _ in range(2):
        fuse_rotary(model, arch_of(model.config))
        fused = [module for module in model.modules() if isinstance(module, FusedRotary | FusedLatentAttention)]
        expected_kind = ARCHS[arch].rotates_halves or arch in LATENT
        rotating = [layer for layer in decoder_layers(model) if not is_linear(mixer(ARCHS[arch].blocks, layer))]
        assert len(fused) == (len(rotating) if expected_kind else 0)
    if DEVICE == "cpu":
        for found, own in zip(run(model, LENGTH), expected, strict=True):
            assert (found - own).norm() <= 1e-5 * own.norm()
    wire(model.to("cpu"), unwired())
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(again, own) for again, own in zip(run(model, LENGTH), expected, strict=True))


@pytest.mark.parametrize(
    "arch", [a for a in tiny.CONFIGS if not ARCHS[a].rotates_halves and a not in {*LATENT, *CHOOSES, *SCALES}]
)
def test_a_family_without_the_kernel_could_not_have_it(arch: str) -> None:
    """A row that says so by mistake would lose the kernel without a message."""
    model = tiny.model(arch)
    expected = run(model, 4)[0]
    fuse_rotary(model.to(DEVICE), replace(ARCHS[arch], rotates_halves=True))
    fused = any(isinstance(module, FusedRotary) for module in model.modules())
    assert not fused or not torch.allclose(run(model, 4)[0].to("cpu"), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v2", {"attn_implementation": "eager"}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_interleave": False}),
    ],
)
def test_latent_attention_reads_its_cache(arch: str, changes: dict[str, Any]) -> None:
    model = tiny.model(arch, **changes).to(DEVICE)
    ids = tiny.tokens(batch=2, length=7).to(DEVICE)
    own = model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    fuse_rotary(model, arch_of(model.config))
    fused = model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(fused.sequences, own.sequences)
    torch.testing.assert_close(torch.stack(fused.logits), torch.stack(own.logits), rtol=0, atol=1e-5)


def test_the_kernel_rotates_and_a_compiler_sees_the_code_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("glm4_moe").to(DEVICE)
    calls: list[tuple[int, int]] = []

    def counted(queries: Tensor, keys: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        calls.append((queries.shape[1], keys.shape[1]))
        return tuple(kernel.rotate_reference(x, *angles) for x in (queries, keys))

    monkeypatch.setattr(kernel, "rotate", counted)
    fuse_rotary(model, arch_of(model.config))
    ids = tiny.tokens().to(DEVICE)
    model(ids)
    config = model.config
    assert calls == [(config.num_attention_heads, config.num_key_value_heads)] * config.num_hidden_layers
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model(ids)
    assert len(calls) == config.num_hidden_layers
