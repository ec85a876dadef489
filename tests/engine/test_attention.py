"""Attention of a decoding step, without repeated keys and without expanded latents, is that of transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kernel_device import DEVICE
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fcsd.engine import attention
from fcsd.engine.decode import Stepper
from fcsd.engine.fused import fuse
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.slots import Slots
from fcsd.models.wiring import Wiring
from fcsd.parallel.tensor.tp_plan import TensorGroup

WINDOW: dict[str, Any] = {"sliding_window": 8}
ALL = (0, 1)


@pytest.mark.parametrize(("shared", "queries", "masked"), [(4, 1, True), (4, 1, False), (1, 1, True), (4, 3, True)])
def test_attention_is_that_of_repeated_keys(shared: int, queries: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2 * shared, queries, 8, generator=generator)
    key, value = (torch.randn(3, 2, 16, 8, generator=generator) for _ in range(2))
    lengths = torch.tensor([16, 5, 1])[:, None, None, None]
    mask = torch.where(torch.arange(16) < lengths, 0.0, torch.finfo(torch.float32).min).expand(3, 1, queries, 16)
    module: Any = SimpleNamespace(num_key_value_groups=shared, is_causal=True)
    given = mask if masked else None
    found, _ = attention.attend(module, query, key, value, given, scaling=0.3)

    module.num_key_value_groups = 1
    whole = repeat_kv(key, shared), repeat_kv(value, shared)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *whole, given, scaling=0.3)
    torch.testing.assert_close(found, expected)


def test_a_step_uses_it_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def noted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return stock(query, *args, **options)

    stock = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
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


def test_a_stepper_needs_no_gradients() -> None:
    """Kernels without a backward pass, such as that of the experts of few tokens, are not used where one may follow."""
    model: Any = tiny.model("llama")
    stepper = Stepper(model, Slots(2, 64, model.device), graphs=False)
    modes: list[bool] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    stepper.prefill([[5, 6, 7], [8, 9]], [0, 1])
    stepper.decode(1, [0, 1])
    assert torch.is_grad_enabled() and modes == [False, False]


@torch.no_grad()
def answers(
    model: Any, slots: int = 3, lengths: tuple[int, ...] = (20, 7, 13), graphs: bool = False
) -> tuple[list[int], list[list[int]], Any]:
    """The first tokens of prompts of these lengths, the tokens after them, and the logits of one more step."""
    stepper = Stepper(model, Slots(slots, 64, model.device), graphs)
    ids = tiny.tokens(batch=3, length=20).tolist()
    prompts = [prompt[:length] for prompt, length in zip(ids, lengths, strict=True)]
    first = stepper.prefill(prompts[:slots], range(slots))
    return first, stepper.decode(2, list(range(slots))), stepper._step()


@torch.no_grad()
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("deepseek_v2", {"q_lora_rank": None}),  # queries of full rank
        ("deepseek_v2", {}),
        ("deepseek_v3", {}),  # values have another size than keys
    ],
)
def test_steps_leave_latents_as_they_are(arch: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1, num_hidden_layers=2, **changes).to(DEVICE)
    wire_tensor_parallel(model, Wiring("standard", ()), TensorGroup(None, 1, 0), "none")
    classes = [type(module) for module in model.modules()]
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_is_plain", lambda module: False)  # latents are expanded
        first, tokens, logits = answers(model)
    expanded: list[int] = []

    def noted(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        expanded.append(inputs[0].shape[2])

    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_pre_hook(noted)
    again, found, kept = answers(model)
    assert (again, found) == (first, tokens)
    torch.testing.assert_close(kept, logits, rtol=0, atol=2e-5)
    assert expanded == [20, 20], "a prefill expands the latents of its own tokens, and a step none"
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "changes"), [("mixtral", WINDOW), ("deepseek_v2", {})])
def test_a_gpu_captures_steps(arch: str, changes: dict[str, Any]) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1, num_hidden_layers=2, **changes).cuda()
    wiring, alone = Wiring("ladder", ALL), TensorGroup(None, 1, 0)
    wire_tensor_parallel(model, wiring, alone, "none")
    first, tokens, _ = answers(model)
    fuse(model, kernels=True)
    wire_tensor_parallel(model, wiring, alone, "none")
    assert answers(model, graphs=True)[:2] == (first, tokens)
