"""A model that serves computes the same with merged projections, and with kernels for norms, rotations and MLPs."""

from typing import Any

import pytest
import tiny
import torch
from benchmarks.infer import own_engine
from benchmarks.infer.workload import Workload
from kernel_device import DEVICE
from representatives import representatives
from test_mlps import gated_mlps

from fcsd.engine.fused import First, fuse
from fcsd.engine.sharded_modules import SplitNorm, _split_norm_class
from fcsd.launch.world import World
from fcsd.models import fused
from fcsd.models.archs import ARCHS
from fcsd.models.fused import FusedExperts, FusedMLP, FusedNorm, FusedRotary
from fcsd.parallel.tensor.tp_plan import TensorGroup

# One has experts with biases, one experts whose inputs are weighted, one an activation that is no module, two have
# experts beside the MLP, one experts without a gate, and the others limit what experts multiply.
OTHER_EXPERTS = {"gpt_oss", "llama4_text", "lfm2_moe", "gemma4_text", "gemma4"}


def parts(model: Any, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("arch", representatives("norm", "mlp", "moe", "rotary"))
def test_a_fused_model_computes_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1).to(DEVICE)
    ids = tiny.tokens(batch=2, length=2).to(DEVICE)  # the interpreter runs a program for each token
    expected = model(ids, use_cache=False).logits
    gated = len(gated_mlps(model))
    fuse(model, kernels=True)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=2e-5)
    assert (parts(model, FusedExperts) > 0) == (not ARCHS[arch].dense and arch not in OTHER_EXPERTS)
    if parts(model, FusedExperts):
        monkeypatch.setattr(fused, "_FEW", 0)  # as for many tokens
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=2e-5)
    assert (parts(model, First) == 0) == (arch == "phi3")
    assert (parts(model, FusedNorm) == 0) == (ARCHS[arch].norm_epsilon is None)
    assert (parts(model, FusedMLP) > 0) == (gated > 0)
    assert (parts(model, FusedRotary) > 0) == ARCHS[arch].rotates_halves


def test_a_norm_over_the_heads_of_all_ranks_is_left_alone() -> None:
    model: Any = tiny.model("olmoe")
    norm = model.model.layers[0].self_attn.q_norm
    norm.__class__ = _split_norm_class(type(norm))
    fuse(model, kernels=True)
    assert isinstance(norm, SplitNorm) and not isinstance(norm, FusedNorm)
    assert isinstance(model.model.layers[1].self_attn.q_norm, FusedNorm)


@pytest.mark.lab
def test_the_benchmark_times_a_fused_model() -> None:
    load = Workload("tiny", layers=2, dtype="float32")
    model = own_engine._model(load, TensorGroup(None, 1, 0), World(0, 1, torch.device("cpu"), None))
    assert parts(model, First) and not parts(model, FusedNorm), "without a GPU no kernels are used"
