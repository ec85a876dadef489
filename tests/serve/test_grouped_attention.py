"""A decoding step attends without repeated keys, and finds what transformers finds with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fcsd.serve import grouped_attention
from fcsd.serve.decode import Stepper
from fcsd.serve.slots import Slots


@pytest.mark.parametrize(("shared", "queries", "masked"), [(4, 1, True), (4, 1, False), (1, 1, True), (4, 3, True)])
def test_attention_is_that_of_repeated_keys(shared: int, queries: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2 * shared, queries, 8, generator=generator)
    key, value = (torch.randn(3, 2, 16, 8, generator=generator) for _ in range(2))
    lengths = torch.tensor([16, 5, 1])[:, None, None, None]
    mask = torch.where(torch.arange(16) < lengths, 0.0, torch.finfo(torch.float32).min).expand(3, 1, queries, 16)
    module: Any = SimpleNamespace(num_key_value_groups=shared, is_causal=True)
    given = mask if masked else None
    found, _ = grouped_attention.attend(module, query, key, value, given, scaling=0.3)

    module.num_key_value_groups = 1
    whole = repeat_kv(key, shared), repeat_kv(value, shared)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *whole, given, scaling=0.3)
    torch.testing.assert_close(found, expected)


def test_a_step_uses_it_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def noted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attention(query, *args, **options)

    attention = grouped_attention.scaled_dot_product_attention
    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", noted)
    model: Any = tiny.model("llama")
    assert model.config._attn_implementation == "sdpa"
    heads, shared = (
        model.config.num_key_value_heads,
        model.config.num_attention_heads // model.config.num_key_value_heads,
    )
    assert shared > 1
    with torch.no_grad():
        stepper = Stepper(model, Slots(2, 64, model.device), graphs=False)
        stepper.prefill([[5, 6, 7], [8, 9]], [0, 1])
        assert not shapes  # a prefill has many queries
        stepper.decode(1, [0, 1])
    assert {shape[:3] for shape in shapes} == {(2, heads, shared)}
    assert model.config._attn_implementation == "sdpa"
