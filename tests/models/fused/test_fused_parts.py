"""Training on a GPU fuses every part that a kernel can compute."""

import pytest
import tiny

from fcsd.models.build import arch_of
from fcsd.models.fused import FusedExperts, FusedLatentAttention, FusedMLP, FusedNorm, FusedRotary, fuse_parts


@pytest.mark.parametrize(("arch", "attention"), [("glm4_moe", FusedRotary), ("deepseek_v2", FusedLatentAttention)])
def test_all_parts_are_fused_or_none(arch: str, attention: type) -> None:
    model = tiny.model(arch)
    for fused in (True, False):
        fuse_parts(model, arch_of(model.config), fused)
        for kind in (FusedNorm, FusedMLP, FusedExperts, attention):
            assert any(isinstance(module, kind) for module in model.modules()) == fused, kind
