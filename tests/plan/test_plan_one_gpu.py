"""The plan of one GPU counts what its fused kernels keep and what an update without ZeRO needs."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from fcsd.models.fused.experts import fuse_experts
from fcsd.plan import Hardware, Setup, activations, plan_setup
from fcsd.plan.model import MetaModel


def test_what_fused_experts_keep_is_what_autograd_saves() -> None:
    """The kernels of one GPU, which run in Triton's interpreter here, beside the stand-ins on the meta device."""
    layer = tiny.model("deepseek_v2", dtype=torch.bfloat16).train().model.layers[1]
    experts = layer.mlp.experts
    index, weights = torch.arange(16 * 2).view(16, 2) % 8, torch.rand(16, 2).requires_grad_()
    hidden = torch.randn(16, 64, dtype=torch.bfloat16).requires_grad_()
    given = {t.untyped_storage().data_ptr() for t in (hidden, index, weights, experts.gate_up_proj, experts.down_proj)}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    fuse_experts(experts)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        experts(hidden, index, weights)
    real = sum(kept.untyped_storage().nbytes() for address, kept in saved.items() if address not in given)
    fuse_experts(experts, False)
    stand_in = tiny.model("deepseek_v2", dtype=torch.bfloat16).to("meta").model.layers[1].mlp.experts
    activations.fuse_experts(stand_in)
    choice = torch.empty(16, 2, dtype=torch.int64, device="meta"), torch.empty(16, 2, device="meta")
    found = activations.measure_layer(
        lambda stream: stand_in(stream, *choice), list(stand_in.parameters()), hidden.detach().to("meta")
    )
    # The rows' numbers and the experts' borders are not counted.
    assert found.kept == pytest.approx(real - 16 * 2 * 8 - 8 * 4, rel=0.01)


def test_one_process_updates_without_copies_of_its_gradients(tmp_path: Path) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    model = MetaModel(str(tmp_path))
    setup = Setup(world=1, micro_batch_size=2, seq_len=64, batch_tokens=512, tokens=5120)
    alone, zero = (
        {moment.name: moment for moment in plan_setup("x", model, model.numbers, each, Hardware(gpus=1)).memory.moments}
        for each in (setup, replace(setup, alone=False))
    )
    trained = model.numbers.total
    assert alone["optimizer step"].gradients == alone["gradient reduction"].gradients == 2 * trained
    assert alone["gradient reduction"].communication == 0 < zero["gradient reduction"].communication
    assert zero["optimizer step"].gradients > 3 * 2 * trained
    assert alone["optimizer step"].optimizer == zero["optimizer step"].optimizer == 12 * trained
