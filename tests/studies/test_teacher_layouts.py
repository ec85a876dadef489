"""The layouts of teachers: fcsd can rewire each, and the faster experts compute what transformers' own compute."""

from pathlib import Path

import pytest
import torch
from studies.teacher.layouts import LAYOUTS, balance_loss, build, config, record_routing, routers
from transformers import AutoTokenizer

from fcsd.models.build import arch_of, decoder_layers

pytestmark = pytest.mark.lab

ROUTERS = {"deepseek_v2": 9, "qwen3_moe": 10, "llama": 0, "moe_64": 9}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layout_trains_with_fast_experts(layout: str, repo: Path) -> None:
    made = config(layout, AutoTokenizer.from_pretrained(repo / "assets/teacher"))
    assert arch_of(made).model_type == ("deepseek_v2" if layout == "moe_64" else layout) and made.vocab_size == 2048
    torch.manual_seed(0)
    model = build(made)
    with torch.no_grad():
        for router in routers(model):
            router.weight.copy_(torch.randn(router.weight.shape))  # so that its choices are far from equal
    assert len(routers(model)) == ROUTERS[layout]
    routed = record_routing(model)
    ids = torch.randint(3, 2048, (2, 32))
    fast = model(input_ids=ids, use_cache=False).logits
    assert len(routed) == ROUTERS[layout]
    balance = balance_loss(routed)
    assert balance > 1 if routed else balance == 0  # above 1, as random routers are uneven
    (fast.logsumexp(-1).mean() + balance).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if routed:
        model.set_experts_implementation("eager")
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, fast, atol=1e-5)


def test_the_siblings_differ_from_the_bundled_teacher_where_they_should(repo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(repo / "assets/teacher")
    sizes = {layout: sum(p.numel() for p in build(config(layout, tokenizer)).parameters()) for layout in LAYOUTS}
    assert 1e8 < sizes.pop("moe_64") < 2e8
    assert max(sizes.values()) < 2 * min(sizes.values())
    assert len(decoder_layers(build(config("llama", tokenizer)))) % 16 == 0  # 16 and 20 of 32 are whole layers
