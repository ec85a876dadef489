"""The bundled teacher's layout: its faster experts compute what transformers' own compute."""

import json
from pathlib import Path

import pytest
import torch
from studies.teacher.layouts import balance_loss, build, config, record_routing, routers
from transformers import AutoTokenizer

pytestmark = pytest.mark.lab


def test_the_layout_trains_with_fast_experts(repo: Path) -> None:
    made = config(AutoTokenizer.from_pretrained(repo / "assets/teacher"))
    torch.manual_seed(0)
    model = build(made)
    with torch.no_grad():
        for router in routers(model):
            router.weight.copy_(torch.randn(router.weight.shape))  # so that its choices are far from equal
    routed = record_routing(model)
    ids = torch.randint(3, 2048, (2, 32))
    fast = model(input_ids=ids, use_cache=False).logits
    assert len(routed) == 9
    balance = balance_loss(routed)
    assert balance > 1  # as random routers are uneven
    (fast.logsumexp(-1).mean() + balance).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.set_experts_implementation("eager")
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, fast, atol=1e-5)


def test_the_layout_is_that_of_the_bundled_teacher(repo: Path) -> None:
    made = config(AutoTokenizer.from_pretrained(repo / "assets/teacher")).to_dict()
    stored = json.loads((repo / "assets/teacher/config.json").read_text())
    free = {"dtype", "architectures", "transformers_version"}
    assert {key for key in stored.keys() & made.keys() if stored[key] != made[key]} <= free
